"""Other engines, each a script that runs under the interpreter that the engine is installed in.

Imports no other package of Baton, only modules of this folder.
"""
