"""OpenAI's Responses API over the conversations of `router.chat`, without a store.

Imports what `router.api` shares.
"""
