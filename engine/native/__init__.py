"""Baton's CPU kernels in C++: their sources, and the library they are built into at first use.

Imports nothing of ours.
"""
