"""Conversations: what a chat template reads, and what a model's text says in return.

One file for each family's format of tool calls. Imports `router.requests`, `router.text`.
"""
