"""Attention over the paged KV pool: the interface (`base`) and its backends, one file each.

Imports the KV pool and, for a card, `engine.gpu`.
"""
