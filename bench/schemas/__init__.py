"""How JSON schemas hold as constraints: `python -m bench.schemas`, and 50 cases of its own.

Imports `router.text` and `protocol`.
"""
