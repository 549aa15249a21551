"""Other engines, each a script that runs under the interpreter that the engine is installed in.

Imports nothing of Baton's but each other.
"""
