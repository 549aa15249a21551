"""Paths in the repository."""

from __future__ import annotations

from pathlib import Path

DEMO_MODEL = Path(__file__).parents[2] / "demo_model"
