"""`baton chat`: a conversation in the terminal with any fleet.

Imports the modules of `cli` below commands, and `process.settings`; no torch.
"""
