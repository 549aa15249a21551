"""CUDA-only parts: Triton kernels, CUDA graphs, 8-bit linear layers.

Imports the attention and layers of `engine`; imports Triton and FlashInfer inside functions.
"""
