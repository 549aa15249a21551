"""The OpenAI-compatible endpoints and their request and response schemas."""
