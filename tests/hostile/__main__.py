"""`python -m tests.hostile`; without arguments a whole run, with `tests.hostile.neighbours`."""

import sys

from tests.hostile import attacks, neighbours
from tests.hostile.core_waits import is_busy

busy = is_busy()
did_harm = attacks.main(sys.argv[1:])
if not sys.argv[1:]:
    did_harm = neighbours.main([], busy) or did_harm
sys.exit(did_harm)
