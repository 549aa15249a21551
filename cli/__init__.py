"""The `baton` command: starts processes and shows their state.

Imports the settings of every process; the processes themselves are named, not imported.
"""
