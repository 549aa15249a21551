"""Grammars that constrain an answer's text: of JSON schemas, regular expressions, structural tags.

Constraints that cannot be enforced are found before a worker sees them. Imports `gateway.text`.
"""
