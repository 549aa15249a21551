"""Other engines, each a script of its own that runs under the interpreter it is installed in."""
