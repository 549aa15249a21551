"""Slots for what layers keep instead of keys and values, and what steps do to them. Pure.

Imports `protocol` and the rest of `scheduling`, but not the scheduler.
"""
