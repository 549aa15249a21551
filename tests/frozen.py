"""Imported last by the fork server: its objects stay out of the collector of forked processes, which
would otherwise copy all their pages."""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
