"""The doctor's rules, one pure function each, grouped by subject.

Imports observations, symptoms and words of `console.doctor`.
"""
