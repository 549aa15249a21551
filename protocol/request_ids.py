"""Ids of the sequences that belong to one client's request: its choices, over all its prompts."""

from __future__ import annotations


def choice_id(request_id: str, index: int) -> str:
    """The id of a request's sequence number `index`, unique in the fleet if `request_id` is."""
    return f"{request_id}-{index}"


def request_of(choice: str) -> str:
    """The request of a sequence, from the sequence's id. Any other id is returned unchanged."""
    request_id, _, index = choice.rpartition("-")
    return request_id if request_id and index.isdecimal() else choice
