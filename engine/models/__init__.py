"""The decoder; every supported architecture is a configuration of it.

Imports the packages of `engine` that it is built from; README.md explains how to add an
architecture.
"""
