"""Decides what one worker does next: which requests run, in which chunks, on which blocks.

Pure decisions, shared by the engine, the router and simulations; callers pass the time in. Imports
`protocol` alone; no torch, sockets, threads or clocks.
"""
