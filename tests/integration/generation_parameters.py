"""What parameters change of how tokens are chosen, where they end, and how they are told."""

from __future__ import annotations

from typing import Any

from tests.integration.parameter_api import CHAT, COMPLETIONS, NUM_TOKENS, Api
from tests.integration.shown_effects import Shown

SHOWN = Shown()
HOT: dict[str, Any] = {"temperature": 2.0, "seed": 3}


@SHOWN.by("temperature", "seed")
def heat_and_seed(api: Api) -> None:
    assert api.text(**HOT) == api.text(**HOT) != api.text()
    assert api.text(**HOT) != api.text(**HOT | {"seed": 4})


@SHOWN.by("top_p", "top_k", "min_p")
def filters(api: Api) -> None:
    for narrow in ({"top_p": 0.001}, {"top_p": 0}, {"top_k": 1}, {"min_p": 1.0}):
        assert api.text(**HOT, **narrow) == api.text()


@SHOWN.by("presence_penalty", "frequency_penalty", "repetition_penalty")
def penalties(api: Api) -> None:
    few: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
    few |= {"allowed_token_ids": list(range(300, 340))}  # it repeats some of these few tokens
    few["prompt"] = "The `for` statement is used to iterate over"
    plain = api.ids(**few)
    for penalty in (
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"repetition_penalty": 3.0},
    ):
        other = api.ids(**few, **penalty)
        assert len(set(other)) > len(set(plain))


@SHOWN.by("logit_bias")
def bias(api: Api) -> None:
    first = api.ids()[0]
    assert api.ids(logit_bias={str(first): -100})[0] != first
    assert set(api.ids(logit_bias={"300": 100})) == {300}


@SHOWN.by("allowed_token_ids", "bad_words")
def vocabulary(api: Api) -> None:
    assert set(api.ids(allowed_token_ids=[300, 301])) <= {300, 301}
    word = api.text().split()[3]
    assert word in api.text()
    assert word not in api.text(bad_words=[word])


@SHOWN.by("n", "best_of")
def choices(api: Api) -> None:
    candidates = api.complete(n=4, logprobs=0, **HOT)["choices"]
    texts = [each["text"] for each in candidates]
    assert len(set(texts)) == 4
    assert texts[0] == api.text(**HOT)
    told = [each["logprobs"]["token_logprobs"] for each in candidates]
    means = {text: sum(each) / len(each) for text, each in zip(texts, told, strict=True)}
    best = sorted(texts, key=lambda text: -means[text])
    assert [each["text"] for each in api.complete(n=2, best_of=4, **HOT)["choices"]] == best[:2]
    assert api.text(best_of=4, **HOT) == best[0]


@SHOWN.by("stop", "stop_sequences", "include_stop_str_in_output")
def stop_strings(api: Api) -> None:
    word = api.text().split()[3]
    before, _, _ = api.text().partition(word)
    assert api.text(stop=word) == before
    assert api.text(stop=["no such text", word]) == before
    assert api.text(stop_sequences=[word]) == before
    assert api.text(stop=word, include_stop_str_in_output=True) == before + word
    told = [api.complete(stop=word), api.stream(COMPLETIONS, stop=word)[-1]]
    word_of_chat = api.message()["content"].split()[3]
    told += [api.chat(stop=word_of_chat), api.stream(CHAT, stop=word_of_chat)[-1]]
    reasons = [each["choices"][0]["stop_reason"] for each in told]
    assert reasons == [word, word, word_of_chat, word_of_chat]


@SHOWN.by("stop_token_ids")
def stop_tokens(api: Api) -> None:
    ids = api.ids()
    cut = ids.index(ids[4])
    assert api.ids(stop_token_ids=[ids[4]]) == ids[: cut + 1]
    [choice] = api.complete(stop_token_ids=[ids[4]])["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ids[4])
    assert api.complete()["choices"][0]["stop_reason"] is None


@SHOWN.by("ignore_eos", "min_tokens", "min_new_tokens", "skip_special_tokens")
def end_of_text(api: Api) -> None:
    whole = api.chat(max_tokens=300)
    assert whole["choices"][0]["finish_reason"] == "stop"
    length = whole["usage"]["completion_tokens"]
    on = {"max_tokens": length + 8}
    endless = api.chat(ignore_eos=True, **on)
    assert endless["choices"][0]["finish_reason"] == "length"
    assert "<|im_end|>" not in endless["choices"][0]["message"]["content"]
    shown = api.message(ignore_eos=True, skip_special_tokens=False, **on)
    assert "<|im_end|>" in shown["content"]
    for name in ("min_tokens", "min_new_tokens"):
        longer = api.chat(**{name: length + 4}, **on)
        assert longer["usage"]["completion_tokens"] >= length + 4


@SHOWN.by(
    *("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens"),
    *("n_predict", "num_predict"),
)
def limits(api: Api) -> None:
    assert api.complete(max_tokens=5)["usage"]["completion_tokens"] == 5
    for name in ("completion_tokens", "output_tokens", "new_tokens"):
        limited = api.chat(max_tokens=None, **{f"max_{name}": 6})
        assert limited["usage"]["completion_tokens"] == 6
        assert limited["choices"][0]["finish_reason"] == "length"
    for name in ("n_predict", "num_predict"):
        assert api.complete(max_tokens=None, **{name: 5})["usage"]["completion_tokens"] == 5


@SHOWN.by("logprobs", "top_logprobs")
def logprobs(api: Api) -> None:
    content = api.chat(logprobs=True, top_logprobs=3)["choices"][0]["logprobs"]["content"]
    assert all(len(each["top_logprobs"]) == 3 for each in content)
    assert "".join(each["token"] for each in content) == api.message()["content"]
    listed = api.complete(logprobs=2)["choices"][0]["logprobs"]
    assert "".join(listed["tokens"]) == api.text()


@SHOWN.by("return_tokens_as_token_ids")
def logprobs_by_id(api: Api) -> None:
    [choice] = api.complete(logprobs=0, return_token_ids=True, return_tokens_as_token_ids=True)[
        "choices"
    ]
    assert choice["logprobs"]["tokens"] == [f"token_id:{each}" for each in choice["token_ids"]]
    told = api.chat(logprobs=True, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    assert all(each["token"].startswith("token_id:") for each in told["content"])


@SHOWN.by("prompt_logprobs")
def prompt_logprobs(api: Api) -> None:
    answer = api.chat(prompt_logprobs=1, return_token_ids=True)
    first, *others = api.stream(prompt_logprobs=1)
    assert first["prompt_logprobs"] == answer["prompt_logprobs"]
    assert not any("prompt_logprobs" in each for each in others)
    told, ids = answer["prompt_logprobs"], answer["prompt_token_ids"]
    assert told[0] is None
    assert [next(iter(each)) for each in told[1:]] == [str(each) for each in ids[1:]]
    assert all(1 in [entry["rank"] for entry in each.values()] for each in told[1:])
    [choice] = api.complete(prompt_logprobs=0)["choices"]
    assert all(len(each) == 1 for each in choice["prompt_logprobs"][1:])


@SHOWN.by("return_token_ids")
def token_ids(api: Api) -> None:
    answer = api.chat(return_token_ids=True)
    assert len(answer["choices"][0]["token_ids"]) == answer["usage"]["completion_tokens"]
    assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]


@SHOWN.by("stream", "stream_options")
def streams(api: Api) -> None:
    for path, key in ((CHAT, "delta"), (COMPLETIONS, "text")):
        events = api.stream(path, stream_options={"include_usage": True})
        assert events[-1]["choices"] == []
        assert events[-1]["usage"]["completion_tokens"] == NUM_TOKENS
        assert all(each["usage"] is None for each in events[:-1])
        pieces = [each["choices"][0][key] for each in events[:-1]]
        text = "".join(each if key == "text" else each.get("content", "") for each in pieces)
        assert text == (api.text() if key == "text" else api.message()["content"])
        options = {"include_usage": True, "continuous_usage_stats": True}
        counts = [
            each["usage"]["completion_tokens"] for each in api.stream(path, stream_options=options)
        ]
        assert counts == sorted(counts)
        assert 0 < counts[0] < counts[-1] == NUM_TOKENS
