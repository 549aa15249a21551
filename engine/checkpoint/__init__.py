"""Reading a checkpoint: its configuration, its files, its weights.

Imports `protocol`, `checkpoint`, `engine.device` and the kinds of layers in `engine`.
"""
