"""A worker refuses a peer by one line that names what differs, on both sides."""

from __future__ import annotations

import msgspec

from process.sockets.hello import HelloPolicy
from protocol import wire
from protocol.messages import HelloAccepted, HelloRefused, Role

OURS = HelloPolicy("w", "i", "model", "layout-a", kv_groups="3 layers without a window")
THEIRS = HelloPolicy("x", "j", "model", "layout-b")


def test_workers_whose_groups_differ_refuse_each_other_by_a_line_that_names_both() -> None:
    assert OURS.answer(THEIRS.hello(Role.DECODE)) == HelloRefused(
        what="KV layout fingerprint",
        ours="layout-a (KV of 3 layers without a window)",
        theirs="layout-b (KV of layers that all keep all tokens)",
    )
    answer = THEIRS.answer(OURS.hello(Role.PREFILL))
    assert isinstance(answer, HelloRefused)
    assert answer.theirs == "layout-a (KV of 3 layers without a window)"


def test_workers_with_equal_layouts_accept_each_other() -> None:
    assert isinstance(OURS.answer(OURS.hello(Role.DECODE)), HelloAccepted)


def test_a_peer_lacks_both_fingerprints_or_none() -> None:
    """A worker without weights has neither; only a router need not know them."""
    hello = OURS.hello(Role.DECODE)
    neither = msgspec.structs.replace(hello, model_fingerprint="", layout_fingerprint="")
    assert isinstance(OURS.answer(neither), HelloAccepted)
    for field, what in (
        ("model_fingerprint", "model fingerprint"),
        ("layout_fingerprint", "KV layout fingerprint"),
    ):
        answer = OURS.answer(msgspec.structs.replace(hello, **{field: ""}))
        assert isinstance(answer, HelloRefused)
        assert answer.what == what
        router = msgspec.structs.replace(hello, role=Role.ROUTER, **{field: ""})
        assert isinstance(OURS.answer(router), HelloAccepted)


def test_a_worker_with_one_group_says_nothing_of_groups() -> None:
    hello = THEIRS.hello(Role.DECODE)
    assert b"kv_groups" not in wire.encode(hello)
    assert msgspec.structs.replace(hello, kv_groups="") == hello
