"""Anthropic's Messages API, built on the conversations of `gateway.chat`.

Imports the modules that `gateway.api` shares.
"""
