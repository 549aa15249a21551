"""What both roles of worker share: the host process, settings, intake, outbound blocks, reports.

Imports `engine`, `kv_transfer`, `process` and what lies below them; no role.
"""
