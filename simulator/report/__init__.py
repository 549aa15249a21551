"""What a simulation showed: `summary` computes it, `text` and `page` show it.

Imports `process` and the rest of `simulator`.
"""
