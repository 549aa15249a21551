"""What only a CUDA card runs: Triton kernels, CUDA graphs, 8-bit linear layers."""
