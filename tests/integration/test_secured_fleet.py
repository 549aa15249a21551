"""A whole fleet whose router asks for keys: started, asked, and watched over as usual."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from cli.fleet import Fleet
from cli.http_json import get_json
from cli.up_settings import UpSettings
from router.api_keys import hash_key, make_key
from tests.integration.reference import DEMO_MODEL

API_KEY, ADMIN_KEY = make_key(), make_key()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder: Path = tmp_path_factory.mktemp("keys")
    (folder / "api").write_text(hash_key(API_KEY))
    (folder / "admin").write_text(hash_key(ADMIN_KEY))
    settings = UpSettings(
        model=str(DEMO_MODEL),
        port=0,
        prefill=0,
        num_blocks=256,
        torch_threads=1,
        device="cpu",
        restart=False,
        api_key_file=str(folder / "api"),
        admin_key_file=str(folder / "admin"),
    )
    with Fleet(settings) as fleet:
        yield fleet


def client(fleet: Fleet, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{fleet.url}/v1", api_key=key, max_retries=0)


def test_openais_client_is_served_with_a_key(fleet: Fleet) -> None:
    with client(fleet, API_KEY) as known:
        answer = known.completions.create(model=DEMO_MODEL.name, prompt="def f(", max_tokens=3)
    assert answer.usage.completion_tokens == 3


@pytest.mark.parametrize("key", [make_key(), ADMIN_KEY, "none"])
def test_openais_client_knows_the_refusal(fleet: Fleet, key: str) -> None:
    with client(fleet, key) as stranger, pytest.raises(openai.AuthenticationError) as caught:
        stranger.models.list()
    assert caught.value.code == "invalid_api_key"


def test_operators_have_keys_of_their_own(fleet: Fleet) -> None:
    def status(path: str, key: str) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.get(f"{fleet.url}{path}", headers=headers).status_code

    for path in ("/fleet", "/metrics", "/requests/none/trace"):
        assert status(path, API_KEY) == 401
        assert status(path, ADMIN_KEY) in (200, 404)
    assert httpx.get(f"{fleet.url}/health").status_code == 200


def test_whoever_started_the_fleet_sees_it(fleet: Fleet) -> None:
    shown = get_json(f"{fleet.url}/fleet", access=fleet.access)
    assert [each["worker_id"] for each in shown] == ["decode-1"]
    assert fleet.check() == []
