"""Where a request runs, and why. Pure: takes a view of the fleet and returns a decision.

Imports `protocol` alone; the clock and the random generator are arguments.
"""
