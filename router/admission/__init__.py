"""Who may send requests, how many at a time, how urgent ones, and who shares which cache.

Keys and their terms, the gate that counts requests in flight, the reading of key files. Imports
`protocol`; knows no HTTP, no fleet and no model.
"""
