"""Requests in other forms than the usual: compressed bodies, and HEAD.

Imports nothing of Baton.
"""
