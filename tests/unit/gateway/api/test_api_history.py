"""A conversation's next turn has the token ids with which its answers were generated."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from gateway.admission.api_keys import KeyRing, hash_key
from gateway.history.answers import AnswerScope
from gateway.http.access import AccessRules
from gateway.text.tokenizer import Tokenizer
from protocol.messages import FinishReason
from router.requests.interface import GenerationRequest
from tests.unit.gateway.api_harness import MODEL, LiveApi, token_steps
from tests.unit.gateway.history.byte_answers import memory, single_bytes

ASK, MORE = {"role": "user", "content": "Hello"}, {"role": "user", "content": "one two"}
TEXT = "Hello world, hello there."
ONE, OTHER, MATE, TEAM = (f"baton-{letter * 43}" for letter in "abcd")
PATHS = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
    "completions": "/v1/completions",
}


@pytest.fixture(scope="module")
def running_api(checkpoint: Path, tokenizer: Tokenizer) -> Iterator[LiveApi]:
    """A server with four keys, of which two share a cache, and with a memory of answers."""
    ring = KeyRing(
        [
            f"{hash_key(ONE)} name=one",
            f"{hash_key(OTHER)} name=other",
            f"{hash_key(MATE)} name=mate cache=team",
            f"{hash_key(TEAM)} name=team cache=team",
        ]
    )
    rules = AccessRules(api=ring, salt=b"the cluster's secret")
    with LiveApi(checkpoint, tokenizer, rules=rules, answers=memory(tokenizer)) as live:
        yield live


def post(api: LiveApi, path: str, body: dict[str, Any], key: str = ONE, **headers: str) -> Any:
    sent = {"Authorization": f"Bearer {key}", **headers}
    response = api.http.post(path, json={"model": MODEL, **body}, headers=sent)
    assert response.status_code == 200, response.text
    return response


def generates(api: LiveApi, text: str, finish: FinishReason = FinishReason.STOP) -> list[int]:
    """Every answer is this text, in tokens of one byte each; returns them."""
    ids = single_bytes(api.tokenizer, text)
    api.generator.script = lambda request: token_steps(request, ids, finish, api.tokenizer)
    return ids


def asked(api: LiveApi) -> GenerationRequest:
    """The last generation."""
    return api.generator.requests[-1]


def turn(api: LiveApi, kind: str, history: list[Any], key: str = ONE, **fields: Any) -> Any:
    """A turn of one of the APIs: its answer's document."""
    field = {"responses": "input", "completions": "prompt"}.get(kind, "messages")
    limit = {"messages": {"max_tokens": 60}, "completions": {"max_tokens": 60}}.get(kind, {})
    return post(api, PATHS[kind], {field: history, **limit, **fields}, key).json()


def chat_history(answer: Any) -> list[Any]:
    return [ASK, answer["choices"][0]["message"], MORE]


HISTORIES = {
    "chat": chat_history,
    "messages": lambda answer: [ASK, {"role": "assistant", "content": answer["content"]}, MORE],
    "responses": lambda answer: [ASK, *answer["output"], MORE],
}


@pytest.mark.parametrize("kind", HISTORIES)
def test_the_next_turn_repeats_the_ids_of_the_answer(api: LiveApi, kind: str) -> None:
    ids = generates(api, f"{TEXT} {kind}")
    answer = turn(api, kind, [ASK])
    before = asked(api).token_ids
    turn(api, kind, HISTORIES[kind](answer))
    assert asked(api).token_ids[: len(before) + len(ids)] == before + ids
    assert api.tokenizer.decode(asked(api).token_ids, skip_special_tokens=False) == (
        "<|start|>user\nHello<|end|>\n<|start|>assistant\n"
        f"{TEXT} {kind}<|end|>\n<|start|>user\none two<|end|>\n<|start|>assistant\n"
    )


@pytest.mark.parametrize("after", [" and more", "\n", "<|end|>\n<|start|>user\nmore"])
def test_a_prompt_may_repeat_a_completion(api: LiveApi, after: str) -> None:
    ids = generates(api, f"{TEXT}{len(after)}")
    text = turn(api, "completions", "one two three")["choices"][0]["text"]  # type: ignore[arg-type]
    before = asked(api).token_ids
    turn(api, "completions", f"one two three{text}{after}")  # type: ignore[arg-type]
    assert asked(api).token_ids == before + ids + api.tokenizer.encode(after, False)


def test_a_conversation_goes_on_token_for_token(api: LiveApi) -> None:
    history: list[Any] = [ASK]
    expected: list[int] = []
    for number in range(4):
        ids = generates(api, f"{TEXT} It is turn {number}")
        message = turn(api, "chat", history)["choices"][0]["message"]
        assert asked(api).token_ids[: len(expected)] == expected
        expected = asked(api).token_ids + ids
        history += [message, {"role": "user", "content": "x"}]


def test_tokenize_says_the_same(api: LiveApi) -> None:
    generates(api, f"{TEXT} counted")
    history = chat_history(turn(api, "chat", [ASK], cache_salt="mine"))
    turn(api, "chat", history, cache_salt="mine")
    ids = asked(api).token_ids
    body = {"messages": history, "cache_salt": "mine"}
    assert post(api, "/tokenize", body).json()["tokens"] == ids
    assert len(post(api, "/tokenize", {"messages": history}).json()["tokens"]) < len(ids)
    counted = post(api, "/v1/messages/count_tokens", body).json()["input_tokens"]
    body = {"input": history, "cache_salt": "mine"}
    assert post(api, "/v1/responses/input_tokens", body).json()["input_tokens"] == len(ids)
    assert counted == len(ids)
    generates(api, f"{TEXT} counted")
    turn(api, "chat", [ASK])
    turn(api, "chat", history)
    counted = post(api, "/v1/messages/count_tokens", {"messages": history}).json()
    assert counted["input_tokens"] == len(asked(api).token_ids) == len(ids)
    body = {"input": history}
    counted = post(api, "/v1/responses/input_tokens", body).json()
    assert counted["input_tokens"] == len(ids)


def edited(history: list[Any]) -> list[Any]:
    return [history[0], {**history[1], "content": history[1]["content"] + "!"}, history[2]]


def elsewhere(history: list[Any]) -> list[Any]:
    return [{**ASK, "content": "Hello."}, *history[1:]]


@pytest.mark.parametrize("change", [edited, elsewhere])
def test_a_history_that_differs_is_encoded_anew(api: LiveApi, change: Any) -> None:
    generates(api, f"{TEXT} once")
    history = change(chat_history(turn(api, "chat", [ASK])))
    turn(api, "chat", history)
    plain = [each["content"] for each in history]
    text = "".join(
        f"<|start|>{role}\n{content}<|end|>\n"
        for role, content in zip(("user", "assistant", "user"), plain, strict=True)
    )
    expected = api.tokenizer.encode(f"{text}<|start|>assistant\n", False)
    assert asked(api).token_ids == expected


def repeats(api: LiveApi, history: list[Any], key: str, **fields: Any) -> bool:
    """Whether a turn has more tokens than the tokenizer's."""
    turn(api, "chat", history, key, **fields)
    ids = asked(api).token_ids
    text = api.tokenizer.decode(ids, skip_special_tokens=False)
    return ids != api.tokenizer.encode(text, False)


def test_tenants_that_share_no_cache_share_no_answers(api: LiveApi) -> None:
    generates(api, f"{TEXT} secret")
    history = chat_history(turn(api, "chat", [ASK], MATE))
    assert repeats(api, history, MATE)
    assert repeats(api, history, TEAM)
    assert not repeats(api, history, OTHER)
    assert not repeats(api, history, TEAM, cache_salt="own")


@pytest.mark.parametrize(
    ("text", "fields", "finish"),
    [
        (f"{TEXT} trimmed \n\n", {}, FinishReason.STOP),
        (f"{TEXT} cut off", {}, FinishReason.LENGTH),
        (f"{TEXT} stopped STOP and more", {"stop": ["STOP"]}, FinishReason.STOP),
    ],
    ids=["trimmed", "cut off", "stopped"],
)
def test_answers_that_end_in_other_ways(
    api: LiveApi, text: str, fields: dict[str, Any], finish: FinishReason
) -> None:
    ids = generates(api, text, finish)
    answer = turn(api, "chat", [ASK], **fields)
    before = asked(api).token_ids
    message = answer["choices"][0]["message"]
    shown = message["content"].rstrip()
    turn(api, "chat", [ASK, {**message, "content": shown}, MORE])
    expected = before + ids[: len(shown)]
    assert asked(api).token_ids[: len(expected)] == expected
    text = api.tokenizer.decode(asked(api).token_ids, skip_special_tokens=False)
    assert f"assistant\n{shown}<|end|>" in text


def test_an_answer_that_the_tokenizer_would_encode_alike_is_not_remembered(
    checkpoint: Path, tokenizer: Tokenizer
) -> None:
    answers = memory(tokenizer)
    with LiveApi(checkpoint, tokenizer, answers=answers) as api:
        api.says(TEXT)
        turn(api, "chat", [ASK])
        assert answers.remembered.num_bytes == 0
        generates(api, TEXT)
        turn(api, "chat", [ASK])
        assert answers.remembered.num_bytes > 0


def streamed(api: LiveApi, history: list[Any], **headers: str) -> list[str]:
    """The ids of a stream's events."""
    body = {"messages": history, "stream": True}
    lines = post(api, PATHS["chat"], body, **headers).text.split("\n")
    return [line.removeprefix("id: ") for line in lines if line.startswith("id: ")]


def test_a_resumed_stream_keeps_the_prompt_of_its_first_life(
    checkpoint: Path, tokenizer: Tokenizer
) -> None:
    key = b"k" * 32
    answers = memory(tokenizer)
    with (
        LiveApi(checkpoint, tokenizer, answers=answers, ids_key=key) as api,
        LiveApi(checkpoint, tokenizer, answers=memory(tokenizer), ids_key=key) as other,
    ):
        generates(api, TEXT)
        generates(other, TEXT)
        history = chat_history(turn(api, "chat", [ASK]))
        plain = streamed(other, history)
        restored = streamed(api, history)
        ids = asked(api).token_ids
        assert ids != asked(other).token_ids
        streamed(api, history, **{"Last-Event-ID": restored[2]})
        assert asked(api).token_ids == ids
        streamed(api, history, **{"Last-Event-ID": plain[2]})
        assert asked(api).token_ids == asked(other).token_ids
        body = {"model": MODEL, "messages": history, "stream": True}
        refused = other.http.post(PATHS["chat"], json=body, headers={"Last-Event-ID": restored[2]})
        assert refused.status_code == 400
        assert "no longer remembered" in json.dumps(refused.json())


def test_a_control_token_in_an_answer_stays_text_in_the_history(
    checkpoint: Path, tokenizer: Tokenizer
) -> None:
    """Whether the model wrote it as one token or in bytes: a message's text has none."""
    start, end = tokenizer.encode("<|start|><|end|>", False)
    answers = memory(tokenizer)
    with LiveApi(checkpoint, tokenizer, answers=answers) as api:
        for ids in (
            [*single_bytes(tokenizer, "I say "), start, *single_bytes(tokenizer, "user")],
            single_bytes(tokenizer, "I say <|end|>"),
        ):
            api.generator.script = lambda request, ids=ids: token_steps(
                request, ids, FinishReason.LENGTH, tokenizer
            )
            answer = turn(api, "chat", [ASK], skip_special_tokens=False)
            turn(api, "chat", chat_history(answer))
            controls = [each for each in asked(api).token_ids if each in (start, end)]
            assert controls == [start, end, start, end, start, end, start]
    assert answers.metrics.restored.collect()[0].samples[0].value == 1


CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'


def test_calls_are_repeated_as_they_were_written_if_the_template_writes_them_alike(
    tools_checkpoint: Path, tools_tokenizer: Tokenizer
) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    answers = memory(tools_tokenizer)
    with LiveApi(tools_checkpoint, tools_tokenizer, max_context=4000, answers=answers) as api:
        for text, is_alike in ((CALL, True), (CALL.replace('": ', '":'), False)):
            ids = generates(api, text)
            message = turn(api, "chat", [ASK], tools=tools)["choices"][0]["message"]
            before = asked(api).token_ids
            (call,) = message["tool_calls"]
            result = {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
            turn(api, "chat", [ASK, message, result], tools=tools)
            repeated = asked(api).token_ids[len(before) : len(before) + len(ids)]
            assert (repeated == ids) is is_alike


class NotingStore:
    """A store of answers that knows none, and notes what it is to keep."""

    asks = False

    def __init__(self) -> None:
        self.names: list[bytes] = []

    async def find(self, scope: AnswerScope, names: Sequence[bytes]) -> list[bytes | None]:
        return [None] * len(names)

    def put(self, scope: AnswerScope, name: bytes, ids: bytes) -> None:
        self.names.append(name)


def test_a_client_keeps_its_answers_out_of_the_store(
    checkpoint: Path, tokenizer: Tokenizer
) -> None:
    store = NotingStore()
    with LiveApi(checkpoint, tokenizer, answers=memory(tokenizer, store)) as api:
        for kind in ("chat", "responses"):
            for wish in ({"store": False}, {"store": True}, {}):
                store.names.clear()
                generates(api, f"{TEXT} {kind} {wish}")
                history = HISTORIES[kind](turn(api, kind, [ASK], **wish))
                assert bool(store.names) is (wish != {"store": False})
                before = asked(api).token_ids
                turn(api, kind, history)
                ids = single_bytes(tokenizer, f"{TEXT} {kind} {wish}")
                assert asked(api).token_ids[: len(before) + len(ids)] == before + ids


def test_a_streamed_answer_is_repeated_as_well(api: LiveApi) -> None:
    text = f"{TEXT} streamed"
    ids = generates(api, text)
    streamed(api, [ASK])
    before = asked(api).token_ids
    turn(api, "chat", [ASK, {"role": "assistant", "content": text}, MORE])
    assert asked(api).token_ids[: len(before) + len(ids)] == before + ids
