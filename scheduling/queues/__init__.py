"""Sequences from waiting to running and back: a scheduler's queues, and who moves on. Pure.

Imports `protocol` and the rest of `scheduling`, but not the scheduler.
"""
