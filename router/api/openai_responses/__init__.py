"""OpenAI's Responses API, built on the conversations of `router.chat`, without a store.

Imports the modules that `router.api` shares.
"""
