"""The HTTP API, tokenising, where each request goes and why, retries. No torch."""
