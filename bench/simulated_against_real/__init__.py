"""The simulator against real CPU fleets: `python -m bench.simulated_against_real`.

`fleets` starts a fleet and describes the same one to the simulator; `calibration` times its steps
and messages; `comparison` runs a load through both; `machine` says whether others used the machine.
Imports `simulator`, `bench.replay` and `bench.tools`.
"""
