"""What commands print: tables, JSON lines, and text of a server without what steers a terminal.

Imports `process`.
"""
