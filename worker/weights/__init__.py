"""Weights from worker to worker: who sends them (`server`, `tensor_stream`), and how a worker that
starts finds and receives them (`choice`, `peer_tensors`).
"""
