"""Layers whose heads keep a state instead of keys and values: Gated DeltaNet and Mamba-2.

`gated_delta` and `mamba2` are layers; the other modules know no layer. Imports the linear layers
of `engine.layers`, and what `engine.layers` may import.
"""
