"""What only a CPU runs: packed weights, fused layers, huge pages; the kernels are in `native`."""
