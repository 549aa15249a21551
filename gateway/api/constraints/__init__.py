"""Constraints on an answer's text: the fields that ask for them, and the grammar for workers.

Fields become `Constraint`s, whichever API or server named them. Knows no endpoint. Imports
`protocol`, `gateway.text` and `gateway.api.context`.
"""
