"""What passes between Baton's processes: messages, the KV layout, sampling, errors.

Imports nothing else of ours and no torch: every other package may import this one.
"""
