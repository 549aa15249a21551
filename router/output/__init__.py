"""From the tokens of a request's sequences to the text of its choices, and the ids of its events.

Imports `text`, `http`, `admission` and the interface of `requests`; knows no format of any answer.
"""
