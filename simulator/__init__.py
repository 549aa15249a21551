"""A fleet in virtual time: the code that schedules, hands over and routes is the code that serves.

Only devices (`devices/`) and links are models. `fleet` builds simulated workers and a router and
runs a trace (`traces/`) through them; `report/` sums up what happened. Imports `scheduling`,
`kv_transfer`, `router` and what lies below; no torch, sockets, threads or clocks besides those of
the progress bar.
"""
