"""A worker's own tiers below its KV pool: when a request loads blocks from them, and how they are
opened. Imports what `worker` may.
"""
