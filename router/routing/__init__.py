"""Where a request runs, and why. Pure: a view of the fleet goes in, a decision comes out.

Imports `protocol` alone; the clock and the random generator are arguments.
"""
