"""Attention over the paged KV pool: the interface (`base`) and its backends, one file each."""
