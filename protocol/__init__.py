"""The types that Baton's processes exchange: messages, the KV layout, sampling, errors.

Imports nothing else of ours and no torch: every other package may import this one.
"""
