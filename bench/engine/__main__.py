"""`python -m bench.engine`."""

from __future__ import annotations

import sys

from bench.engine.comparison import main

sys.exit(main())
