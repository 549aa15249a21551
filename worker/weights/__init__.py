"""Weights from worker to worker: who sends them (`server`, `tensor_stream`), and how a worker that
starts chooses a peer and receives them (`choice`, `peer_tensors`).

Imports `engine.checkpoint`, `kv_transfer`, `process` and the packages below them; nothing else of
`worker`.
"""
