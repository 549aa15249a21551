"""Which worker holds or expects which blocks, in its pool and in its tiers: the cache index.

Pure. Imports `protocol` and `process.number_text`; the clock is an argument.
"""
