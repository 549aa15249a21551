"""Tokens per second of engines: Baton's and its peers', on the same checkpoint."""
