"""Benchmarks: programs that compare contestants side by side in one run and print ratios.

Each command is `python -m bench.NAME`; the folders hold the commands' parts. Imports any package
below `cli`; no package imports a benchmark.
"""
