"""Who may send requests, how many at a time, how urgent ones, and who shares which cache.

Keys and what they allow, the gate that counts requests in flight, the reading of key files. Imports
`protocol`, and of `http_kit` the terms of keys; knows no HTTP, no fleet and no model.
"""
