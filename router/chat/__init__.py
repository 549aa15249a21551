"""Conversations: what a chat template reads, and what a model's text says in return."""
