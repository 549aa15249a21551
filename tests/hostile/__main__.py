"""`python -m tests.hostile`."""

import sys

from tests.hostile import attacks, neighbours

if "--help" in sys.argv or "-h" in sys.argv:
    sys.exit(attacks.main(sys.argv[1:]))
did_harm = attacks.main(sys.argv[1:])
sys.exit(did_harm or neighbours.main([]))
