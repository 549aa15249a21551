"""Weights from worker to worker. The sender is `server` with `tensor_stream`; a starting worker
chooses a peer (`choice`) and receives from it (`peer_tensors`).

Imports `engine.checkpoint`, `kv_transfer`, `process` and the packages below them; nothing else of
`worker`.
"""
