"""`python -m bench.gpu`: builds, checks and measurements of the engine on a CUDA card.

Imports `engine`, `scheduling` and the other benchmarks.
"""
