"""What parameters change of what is asked, and of when it is served."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.http_client import HTTP
from tests.integration.fleets import wait_for, workers
from tests.integration.parameter_api import CHAT, COMPLETIONS, PROMPT, QUESTION, Api
from tests.integration.shown_effects import Shown

SHOWN = Shown()


@SHOWN.by("truncate_prompt_tokens", "truncation_side")
def truncation(api: Api) -> None:
    assert api.prompt_tokens(truncate_prompt_tokens=7) == 7
    ids = [*range(300, 330)]
    cut = api.complete(prompt=ids, truncate_prompt_tokens=9, return_token_ids=True)
    assert cut["choices"][0]["prompt_token_ids"] == ids[-9:]
    cut = api.complete(
        prompt=ids, truncate_prompt_tokens=9, truncation_side="right", return_token_ids=True
    )
    assert cut["choices"][0]["prompt_token_ids"] == ids[:9]
    assert api.complete(prompt=ids * 200, truncate_prompt_tokens=-1)["usage"]["total_tokens"] == (
        4096
    )


@SHOWN.by(
    *("request_id", "service_tier", "user", "metadata", "store", "prediction"),
    *(
        "verbosity",
        "web_search_options",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
    ),
)
def bookkeeping(api: Api) -> None:
    assert api.chat(request_id="mine")["id"] == "chatcmpl-mine"
    assert api.complete(request_id="mine")["id"] == "cmpl-mine"
    assert api.chat(service_tier="auto")["service_tier"] == "default"
    plain = api.message()
    for silent in (
        {"user": "me", "prompt_cache_key": "mine", "safety_identifier": "me"},
        {"metadata": {"a": "b"}, "store": False, "prompt_cache_retention": "24h"},
        {"prediction": {"type": "content", "content": "x"}},
    ):
        assert api.message(**silent) == plain
    assert api.ignored(CHAT, store=True, service_tier="flex") == "store"
    for name, value in (("verbosity", "low"), ("web_search_options", {})):
        assert api.ignored(CHAT, **{name: value}) == name


@SHOWN.by("priority")
def priority(api: Api) -> None:
    """Two prompts arrive while others wait: one overtakes the others, and one lets all others pass.
    The prefill worker is held until all have arrived."""

    def ask(number: int, **fields: Any) -> int:
        """Send a prompt; returns the time at which the first token was sent."""
        ids = [300 + (97 * number + 7 * place) % 700 for place in range(1024)]
        answer = api.complete_patiently(prompt=ids, max_tokens=1, **fields)
        trace = HTTP.get(f"{api.url}/requests/{answer['id']}/trace").raise_for_status().json()
        return int(trace["first_token_us"])

    with ThreadPoolExecutor(12) as pool:
        api.fleet.arm(["prefill-1"], "chunk", 1)
        asked = [pool.submit(ask, 0)]
        api.fleet.held("chunk")
        asked += [pool.submit(ask, number) for number in range(1, 10)]
        wait_for("a queue", lambda: api.fleet.heard("prefill-1")["Prefill"] == 9)
        asked += [pool.submit(ask, 10, priority=5), pool.submit(ask, 11, priority=-5)]
        wait_for("both", lambda: api.fleet.heard("prefill-1")["Prefill"] == 11)
        api.fleet.release("prefill-1", "chunk")
        sent_us = [each.result() for each in asked]
    done = sorted(range(12), key=sent_us.__getitem__)
    assert done[-1] == 10
    assert done.index(11) < len(done) - 3


@SHOWN.by("cache_salt")
def salt(api: Api) -> None:
    def cached(**fields: Any) -> int:
        usage = api.complete(prompt=[*range(400, 500)], **fields)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    cached()
    assert cached() > 0
    assert cached(cache_salt="mine") == 0
    assert cached(cache_salt="mine") > 0


@SHOWN.by("cache_retention")
def retention(api: Api) -> None:
    def retained() -> int:
        return sum(each["blocks_retained"] for each in workers(api.fleet.fleet).values())

    before = retained()
    prompt = [*range(300, 380)]
    api.complete(prompt=prompt, cache_retention={"seconds": 60, "priority": 80})
    wait_for("protected blocks", lambda: retained() >= before + 5)


@SHOWN.by("messages", "model")
def conversation(api: Api) -> None:
    other = api.message(messages=[{"role": "user", "content": "Explain the `with` statement."}])
    assert other != api.message()
    answer = HTTP.post(f"{api.url}{CHAT}", json=api.body(CHAT, {"model": "other"}))
    assert answer.status_code == 404


@SHOWN.by("prompt", "echo")
def prompts(api: Api) -> None:
    ids = api.complete(max_tokens=1, return_token_ids=True)["choices"][0]["prompt_token_ids"]
    assert api.text(prompt=ids) == api.text()
    for several in ([PROMPT, "A class"], [ids, [*range(300, 310)]]):
        texts = [each["text"] for each in api.complete(prompt=several)["choices"]]
        assert texts[0] == api.text()
        assert len(texts) == 2
    assert api.text(echo=True) == PROMPT + api.text()
    assert api.text(prompt=ids, echo=True, max_tokens=0) == PROMPT


@SHOWN.by("suffix")
def suffix(api: Api) -> None:
    assert api.refusal(COMPLETIONS, suffix="end") == "suffix"
    assert api.text(suffix="") == api.text()


@SHOWN.by("add_generation_prompt", "continue_final_message")
def end_of_prompt(api: Api) -> None:
    assert api.prompt_tokens(add_generation_prompt=False) < api.prompt_tokens()
    begun = api.message(max_tokens=30)["content"]
    half = begun[: len(begun) // 2].rpartition(" ")[0]
    messages = [*QUESTION, {"role": "assistant", "content": half}]
    rest = api.message(messages=messages, continue_final_message=True, max_tokens=60)["content"]
    assert (half + rest).startswith(begun)


@SHOWN.by("chat_template_kwargs", "reasoning_effort", "documents")
def template(api: Api) -> None:
    plain = api.prompt_tokens()
    without = api.prompt_tokens(chat_template_kwargs={"enable_thinking": False})
    assert without > plain
    assert api.prompt_tokens(reasoning_effort="none") == without
    assert api.prompt_tokens(reasoning_effort="high") == plain
    assert api.ignored(CHAT, chat_template_kwargs={"no_such": 1}) == "chat_template_kwargs.no_such"
    assert api.prompt_tokens(documents=[{"title": "a", "text": "b"}]) > plain
    assert api.refusal(CHAT, chat_template="x") == "chat_template"
