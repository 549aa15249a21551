"""`python -m bench.router`."""

from __future__ import annotations

import sys

from bench.router.costs import main

sys.exit(main(sys.argv[1:]))
