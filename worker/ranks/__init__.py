"""The ranks of a worker: one process for each, started, watched and ended by the worker's own.

`head` is the worker's side, `hand` what another rank runs, `link` the messages between them.
Imports `engine`, `kv_transfer` and the worker's settings.
"""
