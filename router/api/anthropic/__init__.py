"""Anthropic's Messages API, built on the conversations of `router.chat`.

Imports the modules that `router.api` shares.
"""
