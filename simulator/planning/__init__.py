"""Searches for the fleet that serves a trace best: `candidates` are fleets of so many GPUs, `race`
drops those that fall behind, `ledger` remembers trials. Pure but for the ledger's file. Imports
`protocol` and the rest of `simulator`.
"""
