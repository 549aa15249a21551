"""The sequences of one client's request are known by their ids."""

from __future__ import annotations

import pytest

from protocol.request_ids import choice_id, request_of


@pytest.mark.parametrize("request_id", ["chatcmpl-1", "cmpl-my-own-id-7", "x", "resp_2-0"])
@pytest.mark.parametrize("index", [0, 127])
def test_every_choice_names_its_request(request_id: str, index: int) -> None:
    assert request_of(choice_id(request_id, index)) == request_id


@pytest.mark.parametrize("name", ["r", "", "warm-up", "-1", "a-", "a-b"])
def test_other_ids_stand_for_themselves(name: str) -> None:
    assert request_of(name) == name
