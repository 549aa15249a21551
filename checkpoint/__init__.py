"""Reads the small files of a checkpoint as untrusted input, and tries them in a child process.

Routers and workers read them. Imports `protocol` alone and no torch.
"""
