"""GGUF files: their headers, and the small files of a checkpoint that these headers stand for.

Routers and workers read them. Imports the modules of `checkpoint` and no torch.
"""
