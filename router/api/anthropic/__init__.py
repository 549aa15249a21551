"""Anthropic's Messages API over the conversations of `router.chat`.

Imports what `router.api` shares.
"""
