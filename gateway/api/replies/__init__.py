"""Answers of the endpoints that generate: whole or streamed, with usage and timing.

Imports `output`, `http` and the modules of `api` on which every endpoint stands; no endpoint.
"""
