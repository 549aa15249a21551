"""Vocabularies in the forms in which checkpoints without a tokenizer.json hold them.

`tokenizer_json` finds the file and gives its content as a tokenizer.json; each form has a file.
Imports the modules of `checkpoint` and no torch.
"""
