"""Commands that pods of the Helm chart run, besides routers and workers.

Imports what `cli` may; no other command imports it.
"""
