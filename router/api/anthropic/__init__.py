"""Anthropic's Messages API over the conversations of `router.chat`."""
