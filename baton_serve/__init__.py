"""The one folder that Baton has in an environment.

An installed Baton has all its packages inside this folder, so that other projects may have packages
of the same names; a checkout has them beside it. Imports `cli`.
"""
