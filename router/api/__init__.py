"""The endpoints of the HTTP API: OpenAI's, vLLM's, Anthropic's, and the operators' own.

Imports every other room of the router.
"""
