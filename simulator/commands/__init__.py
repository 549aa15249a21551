"""`baton simulate` and `baton plan`: their settings, and the fleets that these describe.

Imports `process` and the rest of `simulator`.
"""
