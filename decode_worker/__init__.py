"""The decode role: takes over prefilled sequences block by block and generates their tokens.

Imports `worker` and the packages below it; not the other role, not the router.
"""
