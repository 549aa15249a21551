"""The `baton` command: starts processes and shows what they do.

Imports the settings of every process; the processes themselves are named, not imported.
"""
