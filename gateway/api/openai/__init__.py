"""OpenAI's chat completions and completions, and the JSON of their answers.

Imports the modules that `gateway.api` shares.
"""
