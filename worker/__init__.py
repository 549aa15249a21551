"""One worker of either role: loop, tasks, the host process with its life and steps, settings,
intake, reports, blocks in and out; `startup`: what comes before.

Imports `engine`, `kv_transfer`, `process` and the packages below them; no role.
"""
