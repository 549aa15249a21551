"""What the prefix caches save, by worker and prefix, and what other sizes would save.

Imports the fleet and traces.
"""
