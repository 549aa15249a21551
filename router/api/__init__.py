"""The endpoints of the HTTP API: OpenAI's, vLLM's and Anthropic's.

Imports the other rooms of the gateway, and of what routes only the interface.
"""
