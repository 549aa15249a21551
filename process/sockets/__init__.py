"""ZeroMQ sockets: options, encryption, authentication, the control plane and the event plane.

Imports `protocol`.
"""
