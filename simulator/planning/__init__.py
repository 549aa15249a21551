"""Searches for the fleet of a number of GPUs that serves a trace best. `candidates` lists fleets,
`race` drops those that fall behind, `ledger` remembers trials. Pure, except for the ledger's file.
Imports `protocol` and the rest of `simulator`.
"""
