"""The doctor's rules, one pure function each, by what they look at.

Imports observations, symptoms and words of `console.doctor`.
"""
