"""Where a request runs, and why. Pure: takes a view of the fleet and returns a decision.

Imports `protocol`, step models of `scheduling` and texts of `process`; the clock and the random
generator are arguments.
"""
