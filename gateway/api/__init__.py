"""The endpoints of the HTTP API: OpenAI's, vLLM's and Anthropic's.

`openai`, `openai_responses` and `anthropic` hold what is an API's own, the files here what they
share. Imports every other room of the gateway, and the router's interface.
"""
