"""Every parameter alone, sent to the demo model: what it changes in the answer.

Each answer, and each event of a stream, is read by OpenAI's own types on the way. A field without
a test here fails `test_every_field_is_shown`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cli.up_settings import UpSettings
from gateway.api.openai.chat_request import ChatRequest
from gateway.api.openai.completion_request import CompletionRequest
from tests.faults.faulty_fleet import faulty_fleet
from tests.integration import generation_parameters, prompt_parameters, tool_parameters
from tests.integration.fleets import PATIENCE
from tests.integration.parameter_api import CHAT, COMPLETIONS, Api
from tests.integration.shown_effects import Check

THRESHOLD = UpSettings.local_prefill_threshold_tokens
SHOWN = generation_parameters.SHOWN | prompt_parameters.SHOWN | tool_parameters.SHOWN


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    defaults = {"chunk_max_tokens": None, "local_prefill_threshold_tokens": THRESHOLD}
    with faulty_fleet(PATIENCE, **defaults) as fleet:
        yield Api(fleet)


REFUSED = {
    "audio": {},
    "length_penalty": 2,
    "chat_template": "x",
    "modalities": ["audio"],
    "use_beam_search": True,
}
NOT_HERE = {"add_special_tokens", "include_reasoning", "session_id"}
"""The model does not think, its tokenizer adds nothing, and this fleet has one worker of each role
to choose from: unit tests show the effect of these."""


@pytest.mark.parametrize(
    "assert_effect", dict.fromkeys(SHOWN.values()), ids=lambda each: each.__name__
)
def test_a_parameter_has_its_effect(api: Api, assert_effect: Check) -> None:
    assert_effect(api)


def test_every_field_is_shown(api: Api) -> None:
    fields = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
    missing = fields - SHOWN.keys() - REFUSED.keys() - NOT_HERE
    assert not missing, f"show the effect of {missing} here"
    for name, value in REFUSED.items():
        path = CHAT if name in ChatRequest.model_fields else COMPLETIONS
        assert api.refusal(path, **{name: value}) == name
