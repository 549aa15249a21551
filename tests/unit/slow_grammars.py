"""A grammar whose tokens take long: all of its rules may match the same text, in many ways."""

from __future__ import annotations


def ambiguous_grammar(num_rules: int = 300, head: str = "") -> str:
    """A Lark grammar of rules that all match any small letters and blanks, after a `head`: a token
    takes some tenths of a second with 300 of them (14 kB), a millisecond with 50."""
    start = f"{head} x" if head else "x"
    rules = [f"rule_number_{i}: /[a-z ]+/ x?" for i in range(num_rules)]
    choices = " | ".join(f"rule_number_{i}" for i in range(num_rules))
    return "\n".join([f"start: {start}", f"x: {choices}", *rules])
