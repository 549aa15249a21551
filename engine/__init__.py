"""One model on one device: weights, paged KV pool, attention, sampler and the step loop.

Imports `scheduling`, whose batches it runs, and `protocol`; knows no network, role or HTTP. This
file imports nothing, so that a model's configuration can be read without torch.
"""
