"""`python -m tests.fuzz`."""

import sys

from tests.fuzz.fuzzing import main

sys.exit(main(sys.argv[1:]))
