"""Parts of `python -m bench.turns`: what a conversation's next turn computes, and when it begins to
answer."""
