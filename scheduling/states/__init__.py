"""Slots for the states that some layers keep instead of keys and values, and how steps use them.
Pure.

Imports `protocol` and the rest of `scheduling`, but not the scheduler.
"""
