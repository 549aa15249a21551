"""Baton's CPU kernels in C++: their sources, and the library built from them at first use.

Imports no other package of Baton.
"""
