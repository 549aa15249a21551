"""One model on one device: weights, paged KV pool, attention, sampler and the step loop.

It knows nothing of networks, roles or HTTP. This file imports nothing, so that the modules that
need no torch (config, scheduler, block manager, ...) stay importable without it.
"""
