"""`python -m tests.hostile`."""

import sys

from tests.hostile.attacks import main

sys.exit(main(sys.argv[1:]))
