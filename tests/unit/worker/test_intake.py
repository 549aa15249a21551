"""A worker takes nothing from a router that could make its engine fail."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine.engine import EngineLimits
from engine.sampling.grammar import Grammars
from gateway.api.generation_fields import SamplingFields
from protocol.errors import InvalidRequest
from protocol.layout import KvLayout
from protocol.messages import Generate, KvPeer, Prefill
from protocol.sampling import MAX_GRAMMAR_CHARS, SamplingParams
from tests.paths import DEMO_MODEL
from worker.intake import Intake

LAYOUT = KvLayout(
    model_fingerprint="m", dtype="float32", num_layers=1, num_kv_heads=1, block_size=4, head_dim=8
)
GRAMMARS = Grammars(DEMO_MODEL / "tokenizer.json", 10, (2047,))
SAMPLING = SamplingParams(max_tokens=8, seed=1)
GENERATE = Generate(
    request_id="r",
    attempt=2,
    token_ids=[5, 6, 7, 8],
    num_output=1,
    sampling=SAMPLING,
    priority=3,
    deadline_ms=5_000,
    cache_salt="tenant",
)


@pytest.fixture
def intake() -> Intake:
    limits = EngineLimits(vocab_size=10, max_context=16)
    return Intake(limits, LAYOUT, GRAMMARS, "seed", max_deadline_s=60)


def test_a_message_becomes_a_sequence(intake: Intake) -> None:
    sequence = intake.sequence(GENERATE, now=100.0)
    assert sequence.key == ("r", 2)
    assert (sequence.num_prompt, sequence.num_output, sequence.priority) == (3, 1, 3)
    assert (sequence.arrival, sequence.deadline) == (100.0, 105.0)
    assert not sequence.remote
    assert not sequence.prefill_only


def test_roles_and_deadlines_follow_from_the_message(intake: Intake) -> None:
    peer = KvPeer(worker_id="p", incarnation="i", control="tcp://127.0.0.1:1")
    remote = msgspec.structs.replace(GENERATE, prefill=peer, deadline_ms=10**9)
    sequence = intake.sequence(remote, now=0.0)
    assert sequence.remote
    assert sequence.deadline == 60.0
    prefill = Prefill(
        request_id="r",
        attempt=0,
        token_ids=[1],
        num_output=0,
        sampling=SAMPLING,
        deadline_ms=1,
    )
    assert intake.sequence(prefill, now=0.0).prefill_only


def test_the_output_needs_room_on_decode_workers_only(intake: Intake) -> None:
    """Prompt and output may have 17 tokens together, one more than the context."""
    sampling = msgspec.structs.replace(SAMPLING, max_tokens=14)
    with pytest.raises(InvalidRequest, match="17 tokens exceed the context of 16"):
        intake.sequence(msgspec.structs.replace(GENERATE, sampling=sampling), now=0.0)
    fields = {"request_id": "r", "attempt": 0, "num_output": 1, "deadline_ms": 1}
    prefill = Prefill(token_ids=[5, 6, 7, 8], sampling=sampling, target="d1", **fields)
    assert intake.sequence(prefill, now=0.0).target == "d1"
    with pytest.raises(InvalidRequest, match="17 tokens exceed"):
        intake.sequence(msgspec.structs.replace(prefill, token_ids=[5] * 17), now=0.0)


def test_a_grammar_is_followed_from_the_output_so_far(intake: Intake) -> None:
    sampling = msgspec.structs.replace(SAMPLING, grammar='start: ")"+')
    message = msgspec.structs.replace(GENERATE, sampling=sampling)
    sequence = intake.sequence(message, now=0.0)
    assert sequence.grammar is not None
    assert sequence.grammar.error == ""
    assert sequence.grammar.state.is_accepting(), "token 8 is a parenthesis"
    assert intake.sequence(GENERATE, now=0.0).grammar is None


def test_without_a_vocabulary_a_grammar_is_refused() -> None:
    limits = EngineLimits(vocab_size=10, max_context=16)
    intake = Intake(limits, LAYOUT, Grammars(Path("no"), 10, ()), "seed", max_deadline_s=60)
    sampling = msgspec.structs.replace(SAMPLING, grammar='start: "a"')
    with pytest.raises(InvalidRequest, match="cannot follow grammars: no is missing"):
        intake.sequence(msgspec.structs.replace(GENERATE, sampling=sampling), now=0.0)


def test_tenants_do_not_share_blocks(intake: Intake) -> None:
    other = msgspec.structs.replace(GENERATE, cache_salt="other")
    assert intake.sequence(GENERATE, 0.0).hashes != intake.sequence(other, 0.0).hashes


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"token_ids": []}, "num_output"),
        ({"num_output": -1}, "num_output"),
        ({"num_output": 4}, "num_output"),
        ({"token_ids": [1, 10]}, "token_ids"),
        ({"token_ids": [1, -1]}, "token_ids"),
        ({"token_ids": [1] * 10}, "max_tokens"),
        ({"attempt": -1}, "attempt"),
        ({"shared_tokens": -1}, "shared_tokens"),
        ({"shared_tokens": 4}, "shared_tokens"),
        ({"num_output": 3, "sampling": SamplingParams(max_tokens=3, seed=0)}, "max_tokens"),
    ],
)
def test_impossible_requests_are_refused(
    intake: Intake, change: dict[str, object], field: str
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        intake.sequence(msgspec.structs.replace(GENERATE, **change), now=0.0)
    assert raised.value.param == field


NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty",
           "frequency_penalty", "top_k", "seed")  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_a_client_s_number_that_the_api_takes_is_taken_by_workers(
    intake: Intake, name: str
) -> None:
    """Otherwise the client's mistake is answered as the server's."""
    whole = SamplingFields.model_json_schema()["properties"][name]
    schema = next(each for each in whole["anyOf"] if "type" in each and each["type"] != "null")
    ends = {key: schema[key] for key in ("minimum", "maximum", "exclusiveMaximum") if key in schema}
    assert len(ends) == 2, "a field without bounds"
    for key, end in ends.items():
        value = max(end, 0) if name == "top_k" else end - (key == "exclusiveMaximum")
        sampling = msgspec.structs.replace(SAMPLING, **{name: value})
        intake.sequence(msgspec.structs.replace(GENERATE, sampling=sampling), now=0.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 1.5),
        ("min_p", -0.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", 1e9),
        ("seed", 2**64),
        ("min_tokens", 9),
        ("logprobs", 21),
        ("grammar", "x" * (MAX_GRAMMAR_CHARS + 1)),
        ("allowed_token_ids", ()),
        ("allowed_token_ids", (1, 10)),
        ("bad_words", ((),)),
        ("bad_words", ((1, -1),)),
        ("bad_words", ((1,),) * 513),
        ("bad_words", ((1,) * 513,)),
        ("logit_bias", {10: 1.0}),
        ("logit_bias", {1: float("nan")}),
    ],
)
def test_sampling_out_of_range_is_refused(intake: Intake, field: str, value: object) -> None:
    sampling = msgspec.structs.replace(SAMPLING, **{field: value})
    with pytest.raises(InvalidRequest) as raised:
        intake.sequence(msgspec.structs.replace(GENERATE, sampling=sampling), now=0.0)
    assert raised.value.param == field
