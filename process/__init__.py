"""What every process of Baton needs, whatever its role.

Settings, lifecycle, control and event sockets, membership under leases, the embedded Valkey,
metrics and logs. Knows no role's work and no HTTP; imports only `protocol`.
"""
