"""Histories token for token: the router remembers the ids of answers, and later prompts use them.

Imports `text`; knows no HTTP and no workers.
"""
