"""Where things lie in the repository."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
DEMO_MODEL = ROOT / "demo_model"
MIXTURE = ROOT / "tests" / "mixture"
"""A small trained mixture of experts, which `scripts/train_test_mixture.py` makes."""
HYBRID = ROOT / "tests" / "hybrid"
"""A small trained hybrid, which `scripts/train_test_hybrid.py` makes."""
