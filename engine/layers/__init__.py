"""Kinds of layers and their parts: attention, feed-forward, linear layers, rotary embedding, norms.

A backend (`engine.backend`) has the fast versions of the parts. Imports the attention and the
checkpoints of `engine`, and no backend.
"""
