"""A fleet in virtual time. Scheduling, handoffs and routing are the code of real workers and
routers.

Only devices (`devices/`) and links are models. `fleet` builds simulated workers and a router and
runs a trace (`traces/`) through them; `report/` sums up what happened. Imports `scheduling`,
`kv_transfer`, `router` and the packages below them; no torch, sockets, threads or clocks besides
those of the progress bar.
"""
