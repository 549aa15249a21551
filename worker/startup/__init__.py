"""What a worker does before it serves: addresses, the model's files and their trial, its phases.

Imports `worker.settings`, `worker.weights` and the packages below `worker`.
"""
