"""The endpoints of the HTTP API: OpenAI's, vLLM's, Anthropic's, and Baton's own for operators.

Imports every other room of the router.
"""
