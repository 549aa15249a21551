"""The formats in which model families write tool calls: one file for each, and what they share.

Imports the parser, reader and grammar of `gateway.chat`, and `gateway.text`.
"""
