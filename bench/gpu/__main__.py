"""`python -m bench.gpu`."""

from __future__ import annotations

import sys

from bench.gpu.runner import main

sys.exit(main())
