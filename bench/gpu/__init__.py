"""Builds, checks and measures the engine on a CUDA card: `python -m bench.gpu`.

Imports `engine`, `scheduling` and the other benchmarks.
"""
