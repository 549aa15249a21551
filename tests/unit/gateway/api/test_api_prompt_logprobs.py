"""What is told of prompts, in vLLM's shape and in the echo of OpenAI's."""

from __future__ import annotations

import pytest

from protocol.messages import FinishReason
from protocol.sampling import PromptLogprobs
from router.requests.interface import TokenDelta
from tests.unit.gateway.api_harness import MAX_CONTEXT, MODEL, LiveApi, events_of


def text_of(api: LiveApi, token_id: int) -> str:
    return api.tokenizer.token_bytes(token_id).decode()


def test_each_token_comes_first_at_its_place_and_then_the_likely_ones(api: LiveApi) -> None:
    prompt = [50, 60, 41]
    [choice] = api.complete(prompt=prompt, prompt_logprobs=2).json()["choices"]
    likely = {
        str(each): {"logprob": logprob, "rank": rank, "decoded_token": text_of(api, each)}
        for each, logprob, rank in ((40, -0.5, 1), (41, -1.5, 2))
    }
    sixty = {"logprob": -4.0, "rank": 7, "decoded_token": text_of(api, 60)}
    assert choice["prompt_logprobs"] == [
        None,
        {"60": sixty, **likely},
        {"41": likely["41"] | {"logprob": -4.0, "rank": 7}, "40": likely["40"]},
    ]
    assert [*choice["prompt_logprobs"][2]] == ["41", "40"]


def test_without_alternatives_each_place_has_its_own_token(api: LiveApi) -> None:
    answer = api.chat(prompt_logprobs=0, return_token_ids=True).json()
    told, prompt = answer["prompt_logprobs"], answer["prompt_token_ids"]
    assert [[*each] for each in told[1:]] == [[str(each)] for each in prompt[1:]]
    assert "prompt_logprobs" not in api.chat().json()


def test_only_the_first_choice_of_a_prompt_asks_and_all_are_told(api: LiveApi) -> None:
    answer = api.complete(prompt=[[50, 51], [60, 61, 62]], n=2, prompt_logprobs=0).json()
    asked = [request.sampling.prompt_logprobs for request in api.generator.requests]
    assert asked == [0, None, 0, None]
    assert [len(each["prompt_logprobs"]) for each in answer["choices"]] == [2, 2, 3, 3]


def test_an_echo_has_the_prompt_s_logprobs_before_the_output_s(api: LiveApi) -> None:
    prompt = [50, 60, 61]
    [choice] = api.complete(prompt=prompt, echo=True, logprobs=1).json()["choices"]
    listed = choice["logprobs"]
    echo = "".join(text_of(api, each) for each in prompt)
    assert choice["text"] == f"{echo}Hello"
    assert listed["tokens"][:3] == [text_of(api, each) for each in prompt]
    assert "".join(listed["tokens"][3:]).startswith("Hello")
    assert listed["token_logprobs"][:4] == [None, -4.0, -4.0, -0.5]
    assert listed["top_logprobs"][:2] == [None, {text_of(api, 40): -0.5, text_of(api, 60): -4.0}]
    assert listed["text_offset"][:4] == [0, 1, 2, 3]


@pytest.mark.parametrize("skips_special", [None, False])
def test_offsets_are_those_of_the_echoed_text(api: LiveApi, skips_special: bool | None) -> None:
    fields = {"echo": True, "logprobs": 0, "max_tokens": 0, "skip_special_tokens": skips_special}
    for prompt in ("a<|start|>w\u00f6rld", [66, 0, 67]):
        [choice] = api.complete(prompt=prompt, **fields).json()["choices"]
        listed, text = choice["logprobs"], choice["text"]
        assert (text == prompt) or isinstance(prompt, list)
        for token, offset in zip(listed["tokens"], listed["text_offset"], strict=True):
            is_hidden = token == "<|start|>" and "<|start|>" not in text
            assert is_hidden or token.startswith("bytes:") or text[offset:].startswith(token)


@pytest.mark.parametrize("fields", [{"logprobs": 1}, {"prompt_logprobs": 1}])
def test_of_an_echo_alone_one_token_is_generated_and_none_reported(
    api: LiveApi, fields: dict[str, int]
) -> None:
    answer = api.complete(prompt="Hello there", echo=True, max_tokens=0, n=2, **fields).json()
    assert [each["text"] for each in answer["choices"]] == ["Hello there"] * 2
    assert [each["finish_reason"] for each in answer["choices"]] == ["length"] * 2
    assert answer["usage"]["completion_tokens"] == 0
    [request] = api.generator.requests
    assert request.sampling.max_tokens == 1
    told = answer["choices"][1].get("prompt_logprobs") or answer["choices"][1]["logprobs"]["tokens"]
    assert len(told) == len(request.token_ids)


def test_the_token_that_is_not_reported_needs_room(api: LiveApi) -> None:
    fields = {"echo": True, "max_tokens": 0, "logprobs": 0}
    assert api.complete(prompt=[66] * (MAX_CONTEXT - 1), **fields).status_code == 200
    assert api.complete(prompt=[66] * MAX_CONTEXT, **fields).status_code == 400


def test_the_larger_wish_decides_how_many_alternatives_are_computed(api: LiveApi) -> None:
    fields = {"echo": True, "logprobs": 1, "prompt_logprobs": 3}
    [choice] = api.complete(prompt=[50, 60], **fields).json()["choices"]
    assert api.generator.requests[0].sampling.prompt_logprobs == 3
    assert len(choice["prompt_logprobs"][1]) == 4
    assert len(choice["logprobs"]["top_logprobs"][1]) == 2


def test_what_is_impossible_is_reported_as_a_number(api: LiveApi) -> None:
    told = PromptLogprobs(0, b"\x00\x00\x80\xff", b"\x01\x00\x00\x00", b"", b"")  # -infinity
    delta = TokenDelta([66], None, FinishReason.LENGTH, prompt_logprobs=told)
    api.generator.script = lambda request: [delta]
    [choice] = api.complete(prompt=[50, 60], prompt_logprobs=0).json()["choices"]
    assert choice["prompt_logprobs"][1]["60"]["logprob"] == -9999.0


def test_in_a_stream_the_first_chunk_of_each_choice_has_them(api: LiveApi) -> None:
    asked = {"prompt": [[50, 51], [60, 61, 62]], "n": 2, "prompt_logprobs": 1}
    whole = api.complete(**asked).json()["choices"]
    texts = dict.fromkeys(range(4), "")
    for event in events_of(api.complete(**asked, stream=True).text):
        [choice] = event["choices"]
        is_first = not texts[choice["index"]]
        assert choice.get("prompt_logprobs") == (
            whole[choice["index"]]["prompt_logprobs"] if is_first else None
        )
        texts[choice["index"]] += choice["text"]
    assert list(texts.values()) == [each["text"] for each in whole]


@pytest.mark.parametrize("max_tokens", [1, 9])
def test_a_chat_s_first_chunk_has_them(api: LiveApi, max_tokens: int) -> None:
    asked = {"prompt_logprobs": 2, "max_tokens": max_tokens}
    options = {"include_usage": True, "continuous_usage_stats": True}
    first, *others = events_of(api.chat(**asked, stream=True, stream_options=options).text)
    whole = api.chat(**asked).json()
    assert first["prompt_logprobs"] == whole["prompt_logprobs"]
    assert not any("prompt_logprobs" in each for each in others)
    assert others[-1]["usage"] == whole["usage"]


@pytest.mark.parametrize("max_tokens", [0, 9])
def test_an_echo_streams_its_logprobs_before_the_output_s(api: LiveApi, max_tokens: int) -> None:
    asked = {"echo": True, "logprobs": 2, "max_tokens": max_tokens, "n": 2, "prompt": "Hello there"}
    whole = api.complete(**asked).json()["choices"]
    events = events_of(api.complete(**asked, stream=True).text)
    for each in whole:
        parts = [
            one for event in events for one in event["choices"] if one["index"] == each["index"]
        ]
        assert "".join(part["text"] for part in parts) == each["text"]
        for name, listed in each["logprobs"].items():
            assert [entry for part in parts for entry in part["logprobs"][name]] == listed


def test_a_resumed_stream_tells_them_to_those_who_have_not_heard(api: LiveApi) -> None:
    asked = {"n": 2, "prompt_logprobs": 0, "stream": True, "model": MODEL, "prompt": "Hello"}
    answer = api.post("/v1/completions", asked)
    assert [each.is_resumable for each in api.generator.requests] == [False, False]
    ids = [line[4:] for line in answer.text.split("\n") if line.startswith("id: ")]
    events = events_of(answer.text)
    for number, last_id in enumerate(ids):
        rest = events_of(api.post("/v1/completions", asked, **{"Last-Event-ID": last_id}).text)
        heard = [each["choices"][0] for each in (*events[: number + 1], *rest)]
        assert [each["index"] for each in heard if "prompt_logprobs" in each] in ([0, 1], [1, 0])
