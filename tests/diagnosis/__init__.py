"""Real fleets with planted faults or odd loads, judged by what the console says.

`python -m tests.diagnosis [NAME ...]` runs them and prints a score.
"""
