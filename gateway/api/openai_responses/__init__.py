"""OpenAI's Responses API, built on the conversations of `gateway.chat`, without a store.

Imports the modules that `gateway.api` shares.
"""
