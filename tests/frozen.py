"""Imported last by the fork server: computes what every process would, and keeps the server's
objects out of the collector of forked processes, which would otherwise copy all of their pages."""

from __future__ import annotations

import gc

from cli.commands import settings_classes
from gateway.text.character_classes import character_classes
from process.settings.spec import specs_of

for _each in settings_classes():
    specs_of(_each)
character_classes()
gc.collect()
gc.freeze()
