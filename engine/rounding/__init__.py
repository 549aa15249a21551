"""Rounds a checkpoint's weights to blocks of 4 and 5 bits for a text's inputs, ahead of serving.

`quantized_checkpoint` goes through the model layer by layer: `recording` keeps the inputs of each
product, `compensation` rounds the weights for them, and `checkpoint_file` writes the tensors.
Imports the models, layers and CPU parts of `engine`.
"""
