"""What only a CUDA card runs: Triton kernels, CUDA graphs, 8-bit linear layers.

Imports the attention and layers of `engine`; Triton and FlashInfer inside functions.
"""
