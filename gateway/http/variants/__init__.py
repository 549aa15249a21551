"""Requests in uncommon forms: compressed bodies, and HEAD.

Imports nothing of Baton.
"""
