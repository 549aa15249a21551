"""From the tokens of a request's sequences to the text of its choices, and the ids of its events.

Imports `gateway.history`, `gateway.text`, `gateway.admission`, the gateway's metrics and the
router's interface; knows no format of any answer.
"""
