"""Imported last by the fork server: keeps its objects out of the collector of forked processes,
which would otherwise copy all of the server's pages."""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
