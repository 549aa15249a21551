"""Text and tokens: tokenizer, detokenizer, chat template, stop strings, grammars.

Imports `protocol`.
"""
