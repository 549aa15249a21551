"""HTTP code that the gateway, the console and the router share: errors, event streams, callers.

A caller is known by its key's digest, has its key's terms, and waits for its turns. Imports
`protocol` and the accounts of shares in `scheduling`; knows no endpoint, no fleet and no model.
"""
