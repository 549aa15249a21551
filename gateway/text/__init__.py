"""Text and tokens: tokenizer, detokenizer, chat templates, stop strings.

Imports `checkpoint`, `protocol`, and of `http_kit` the turns of callers.
"""
