"""Text and tokens: tokenizer, detokenizer, chat templates, stop strings.

Imports `checkpoint` and `protocol`.
"""
