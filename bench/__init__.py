"""Benchmarks: programs that compare side by side in one run and print ratios.

Each command is `python -m bench.NAME`; the folders hold what a command consists of. Imports any
package below `cli`; nothing imports a benchmark.
"""
