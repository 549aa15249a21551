"""Parts of a layer that every model shares: linear layers, rotary embedding, norms and gates.

Imports `engine.cpu` and `engine.gpu`, which have fast versions of these parts.
"""
