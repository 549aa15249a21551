"""The decoder, of which every supported architecture is a configuration.

Imports the rooms of `engine` that it is made of; README.md says how an architecture is added.
"""
