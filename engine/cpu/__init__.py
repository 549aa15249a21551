"""CPU-only parts: packed weights, fused layers, huge pages. The kernels are in `native`.

Imports the attention and layers of `engine`.
"""
