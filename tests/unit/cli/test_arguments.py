"""Names among flags: in any order, and with both ways of giving a flag its value."""

from __future__ import annotations

from itertools import permutations

import pytest

from cli.arguments import split_names
from cli.chat.settings import ChatSettings
from cli.drain import DrainSettings

VALUES = {"--redis-url": "redis://h:1", "--wait-s": "-3"}


@pytest.mark.parametrize("joined", [True, False])
def test_flags_and_a_name_stand_in_any_order(joined: bool) -> None:
    groups = [[f"{name}={text}"] if joined else [name, text] for name, text in VALUES.items()]
    for order in permutations([["d1"], *groups]):
        flags, names = split_names(DrainSettings, [word for group in order for word in group])
        assert names == ["d1"]
        assert sorted(flags) == sorted(word for group in groups for word in group)


def test_what_follows_two_dashes_is_a_name() -> None:
    assert split_names(DrainSettings, ["--", "--d1", "x"]) == ([], ["--d1", "x"])
    assert split_names(DrainSettings, ["--wait-s", "--", "d1"]) == (["--wait-s", "--"], ["d1"])
    assert split_names(DrainSettings, ["--config", "f", "-", "--typo"]) == (
        ["--config", "f", "--typo"],
        ["-"],
    )


def test_another_name_of_a_flag_takes_its_value_too() -> None:
    for name in ("--router-url", "--url"):
        assert split_names(ChatSettings, ["a", name, "http://h:1"]) == ([name, "http://h:1"], ["a"])
