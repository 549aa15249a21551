"""What passes between Baton's processes: messages, the KV layout, sampling, errors.

Torch-free, and free of anything else of ours: every other package may import this one.
"""
