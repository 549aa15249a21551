"""Replays a trace against a live system over HTTP: `python -m bench.replay`.

`prompts` makes synthetic prompts of the recorded sizes and shared prefixes, of words that are one
token each for the served model (`vocabulary`); `player` sends them, sessions in a closed loop.
Imports `simulator` and `bench.tools`.
"""
