"""Imported last by the fork server: computes what every process would, and keeps the server's
objects out of the collector of forked processes, which would otherwise copy all of their pages."""

from __future__ import annotations

import gc
from pathlib import Path

from cli.commands import settings_classes
from gateway.text import tokenizer
from gateway.text.character_classes import character_classes
from gateway.text.checkpoint_texts import ChatTemplates, load_chat_templates
from process.settings.spec import specs_of
from tests.paths import DEMO_MODEL

for _each in settings_classes():
    specs_of(_each)
character_classes()
_TEMPLATES = load_chat_templates(DEMO_MODEL)
if _TEMPLATES.default is not None:
    _TEMPLATES.default.shape()


def _templates_of(folder: Path) -> ChatTemplates:
    """The chat templates in a folder. Those of the bundled model are compiled once: compiling takes
    half of a router's start."""
    return _TEMPLATES if folder == DEMO_MODEL else load_chat_templates(folder)


tokenizer.load_chat_templates = _templates_of
gc.collect()
gc.freeze()
