"""Which clients may send requests, how many at a time, how urgent, and which clients share a cache.

Has the keys and their terms, the gate that counts requests in flight, and the reader of key files.
Imports `protocol`, and from `http_kit` the terms of keys. Does not know HTTP, the fleet or models.
"""
