"""The prefill role: computes prompts in chunks and streams their KV blocks to decode workers.

Imports `worker` and the packages below it; not the other role, not the router.
"""
