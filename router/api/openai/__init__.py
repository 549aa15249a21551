"""OpenAI's chat completions and completions, and the JSON that they answer with.

Imports what `router.api` shares.
"""
