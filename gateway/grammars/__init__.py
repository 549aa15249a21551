"""Grammars that constrain an answer's text: of JSON schemas, regular expressions, structural tags.

What cannot be enforced is found before a worker sees it. Imports `gateway.text`.
"""
