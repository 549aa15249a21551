"""The endpoints of the HTTP API: OpenAI's, vLLM's and Anthropic's.

`openai`, `openai_responses` and `anthropic` hold the code of one API, the files here the shared
code. Imports every other room of the gateway, and the router's interface.
"""
