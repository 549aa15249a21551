"""The store that holds the fleet: membership under leases in Redis or Valkey.

Imports `protocol`.
"""
