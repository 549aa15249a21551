"""Which JSON schemas hold as constraints, with 50 cases of its own: `python -m bench.schemas`.

Imports `gateway.text` and `protocol`.
"""
