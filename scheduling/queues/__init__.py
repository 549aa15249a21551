"""A scheduler's queues, and the rules by which sequences move between waiting and running. Pure.

Imports `protocol` and the rest of `scheduling`, but not the scheduler.
"""
