"""Completions that are the best of several candidates."""

from __future__ import annotations

from protocol.messages import FinishReason
from protocol.sampling import TokenLogprobs
from router.requests.interface import GenerationRequest, TokenDelta
from router.requests.trace import RequestTrace
from tests.unit.gateway.api_harness import MODEL

END = 1


def test_the_best_of_several_are_those_whose_tokens_are_the_likeliest(api):
    """Candidate i has i tokens of log-probability -(i * 2 % 5), and an end of -9."""
    ids = api.tokenizer.encode("Hello there", add_special_tokens=False)

    def script(request: GenerationRequest) -> list[TokenDelta]:
        number = int(request.request_id.rpartition("-")[2])
        tokens = ids[:number]
        logprobs = [TokenLogprobs(-float(number * 2 % 5), ()) for _ in tokens]
        return [TokenDelta([*tokens, END], [*logprobs, TokenLogprobs(-9.0, ())], FinishReason.STOP)]

    api.generator.script = script
    answer = api.complete(best_of=5, n=2).json()
    texts = [api.tokenizer.decode(ids[:number]) for number in range(5)]
    assert [each["text"] for each in answer["choices"]] == [texts[3], texts[4]]
    assert [each["index"] for each in answer["choices"]] == [0, 1]
    assert [each["logprobs"] for each in answer["choices"]] == [None, None]
    made = sum(len(ids[:number]) + 1 for number in range(5))
    assert answer["usage"]["completion_tokens"] == made, "all of them"
    assert {each.sampling.logprobs for each in api.generator.requests} == {0}
    told = api.complete(best_of=3, logprobs=2).json()["choices"][0]["logprobs"]
    assert told["token_logprobs"] == [-2.0, -9.0]


def test_the_timing_of_candidates_is_told_by_their_places_in_the_answer(api):
    """Candidate i has a log-probability of -(i * 2 % 5), and its first token after 1 + i ms."""

    def script(request: GenerationRequest) -> list[TokenDelta]:
        number = int(request.request_id.rpartition("-")[2])
        trace = RequestTrace(request.request_id, 1000, 1, first_token_us=2000 + 1000 * number)
        api.traces[request.request_id] = trace
        logprobs = TokenLogprobs(-float(number * 2 % 5), ())
        return [TokenDelta([70], [logprobs], FinishReason.LENGTH)]

    api.generator.script = script
    body = {"model": MODEL, "prompt": "Hi", "best_of": 4, "n": 2}
    answer = api.post("/v1/completions", body, **{"x-baton-timing": "1"}).json()
    shown = [(each["index"], each["ttft_ms"]) for each in answer["baton"]["choices"]]
    assert shown == [(0, 1.0), (1, 4.0), (None, 2.0), (None, 3.0)]


def test_the_best_are_chosen_for_each_prompt(api):
    answer = api.complete(prompt=["a", "b"], best_of=3, n=1).json()
    assert len(api.generator.requests) == 6
    assert [each["index"] for each in answer["choices"]] == [0, 1]
