"""The decode role: takes over prefilled sequences block by block and generates their tokens."""
