"""Reading a checkpoint: its configuration, its files, its weights.

Imports `protocol`, `checkpoint` and `engine.device`; only `weights` needs torch.
"""
