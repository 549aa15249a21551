"""Baton's placement against other policies, on recorded traffic in the simulator:
`python -m bench.policies`.

`cells` lists which traffic goes to which fleet, and simulates it; a ledger keeps finished cells, so
that a stopped run can be resumed. `real` compares two placements on real workers. Imports
`simulator`, and other benchmarks' loads.
"""
