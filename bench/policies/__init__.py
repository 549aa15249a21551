"""Baton's placement against other policies, on recorded traffic in the simulator:
`python -m bench.policies`.

`cells` says which traffic goes to which fleet, and simulates it; `ledger` keeps what is done, so
that a run that was stopped goes on. Imports `simulator`.
"""
