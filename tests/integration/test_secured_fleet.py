"""A whole fleet whose router asks for keys: started, asked, and watched over as usual."""

from __future__ import annotations

import json
import os
import signal
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import trustme

from cli.fleet import Fleet
from cli.http_json import RouterAccess, RouterUnreachable, get_json
from cli.pods.check import main as check
from cli.status import main as status
from cli.up_settings import UpSettings
from gateway.admission.api_keys import hash_key, make_key
from protocol.errors import ServiceError
from tests.forked import ForkedChildren
from tests.integration.reference import DEMO_MODEL

API_KEY, ADMIN_KEY = make_key(), make_key()
OTHER_KEY, TEAM_KEYS = make_key(), (make_key(), make_key())
LINES = [
    hash_key(API_KEY),
    f"{hash_key(OTHER_KEY)} name=other",
    *(f"{hash_key(key)} name=team-{place} cache=team" for place, key in enumerate(TEAM_KEYS)),
]
PUBLIC = "def public(token):\n    return token == " + "2 + " * 60
WAIT_S = 60.0


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder: Path = tmp_path_factory.mktemp("keys")
    (folder / "api").write_text("\n".join(LINES))
    (folder / "admin").write_text(hash_key(ADMIN_KEY))
    (folder / "prefixes").write_text(json.dumps({"prompt": PUBLIC}))
    certificate = trustme.CA().issue_cert("fleet.example")
    certificate.private_key_and_cert_chain_pem.write_to_path(folder / "tls.pem")
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
        shared_prefixes_file=str(folder / "prefixes"),
        tls_cert_file=str(folder / "tls.pem"),
    )
    with Fleet(settings, ForkedChildren(settings)) as fleet:
        yield fleet


def client(fleet: Fleet, key: str) -> openai.OpenAI:
    http_client = httpx.Client(verify=trusting(fleet))
    return openai.OpenAI(
        base_url=f"{fleet.url}/v1", api_key=key, max_retries=0, http_client=http_client
    )


def trusting(fleet: Fleet) -> ssl.SSLContext:
    """Trusts the fleet's own certificate, and that it is reached by another name."""
    context = ssl.create_default_context(cafile=fleet.settings.tls_cert_file)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = False
    return context


def test_openais_client_is_served_with_a_key(fleet: Fleet) -> None:
    with client(fleet, API_KEY) as known:
        answer = known.completions.create(model=DEMO_MODEL.name, prompt="def f(", max_tokens=3)
    assert answer.usage.completion_tokens == 3


@pytest.mark.parametrize("key", [make_key(), ADMIN_KEY, "none"], ids=["unknown", "admin", "none"])
def test_openais_client_knows_the_refusal(fleet: Fleet, key: str) -> None:
    with client(fleet, key) as stranger, pytest.raises(openai.AuthenticationError) as caught:
        stranger.models.list()
    assert caught.value.code == "invalid_api_key"


def cached_tokens(fleet: Fleet, key: str, prompt: str) -> int:
    """How much of a prompt the answer to a key says was cached."""
    with client(fleet, key) as known:
        answer = known.completions.create(model=DEMO_MODEL.name, prompt=prompt, max_tokens=1)
    return answer.usage.prompt_tokens_details.cached_tokens


def test_no_key_learns_what_another_one_asked(fleet: Fleet) -> None:
    prompt = "def secret(token):\n    return token == " + "1 + " * 60
    assert cached_tokens(fleet, API_KEY, prompt) == 0
    assert cached_tokens(fleet, API_KEY, prompt) > 0
    assert cached_tokens(fleet, OTHER_KEY, prompt) == 0
    assert cached_tokens(fleet, TEAM_KEYS[0], prompt) == 0
    assert cached_tokens(fleet, TEAM_KEYS[1], prompt) > 0, "they are one group"


def test_all_keys_share_what_the_operator_declares_and_nothing_behind_it(fleet: Fleet) -> None:
    prompt = PUBLIC + "3 + " * 60
    assert cached_tokens(fleet, API_KEY, prompt) == 0
    whole = cached_tokens(fleet, API_KEY, prompt)
    public = cached_tokens(fleet, OTHER_KEY, prompt)
    assert 0 < public < whole
    assert public == cached_tokens(fleet, TEAM_KEYS[0], prompt)
    assert cached_tokens(fleet, OTHER_KEY, prompt) == whole, "its own blocks by now"
    answer = httpx.post(
        f"{fleet.url}/tokenize",
        json={"prompt": PUBLIC},
        headers={"Authorization": f"Bearer {OTHER_KEY}"},
        verify=trusting(fleet),
    )
    size = fleet.settings.block_size
    assert public == answer.json()["count"] // size * size


def test_requests_are_listed_with_the_names_of_their_keys(fleet: Fleet) -> None:
    cached_tokens(fleet, OTHER_KEY, "def named(")
    shown = get_json(f"{fleet.url}/requests", access=fleet.access)
    assert shown["rows"][0]["key"] == "other"


@pytest.mark.parametrize("by_signal", [False, True], ids=["look", "hangup"])
def test_a_key_is_revoked_and_comes_back_without_a_restart(fleet: Fleet, by_signal: bool) -> None:
    path = Path(fleet.settings.api_key_file or "")

    def set_lines(lines: list[str], until: int) -> None:
        path.write_text("\n".join(lines))
        if by_signal:
            os.kill(fleet.processes["router"].pid, signal.SIGHUP)
        end = time.monotonic() + WAIT_S
        while get(fleet, "/v1/models", OTHER_KEY).status_code != until:
            assert time.monotonic() < end, "the key file was not read again"
            time.sleep(0.05)

    set_lines([LINES[0], *LINES[2:]], until=401)
    with client(fleet, API_KEY) as known:
        assert known.models.list().data
    set_lines(LINES, until=200)


def test_operators_have_keys_of_their_own(fleet: Fleet) -> None:
    for path in ("/fleet", "/metrics", "/requests/none/trace"):
        assert get(fleet, path, API_KEY).status_code == 401
        assert get(fleet, path, ADMIN_KEY).status_code in (200, 404)
    assert get(fleet, "/health").status_code == 200


def get(fleet: Fleet, path: str, key: str = "") -> httpx.Response:
    """The answer to a key, if any."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.get(f"{fleet.url}{path}", headers=headers, verify=trusting(fleet), timeout=WAIT_S)


def test_the_user_who_started_the_fleet_sees_it(fleet: Fleet) -> None:
    assert fleet.url.startswith("https://")
    shown = get_json(f"{fleet.url}/fleet", access=fleet.access)
    assert [each["worker_id"] for each in shown["workers"]] == ["decode-1"]
    assert fleet.check() == []


def test_status_shows_the_fleet_with_key_and_certificate(fleet: Fleet, monkeypatch, capsys) -> None:
    flags = [f"--router-url={fleet.url}", f"--cert-file={fleet.settings.tls_cert_file}", "--json"]
    monkeypatch.setenv("BATON_ADMIN_KEY", ADMIN_KEY)
    assert status(flags) == 0
    assert "decode-1" in capsys.readouterr().out
    monkeypatch.setenv("BATON_ADMIN_KEY", API_KEY)
    with pytest.raises(ServiceError, match="operator's key"):
        status(flags)


def test_check_sends_a_chat_with_key_and_certificate(fleet: Fleet, monkeypatch, capsys) -> None:
    flags = [
        f"--router-url={fleet.url}",
        f"--cert-file={fleet.settings.tls_cert_file}",
        "--wait-s=0",
    ]
    monkeypatch.setenv("BATON_API_KEY", f"{API_KEY}, {make_key()}")
    assert check(flags) == 0
    assert capsys.readouterr().out == f"{DEMO_MODEL.name}: 16 tokens by decode-1\n"
    assert check([*flags, "--both-pools"]) == 1
    assert "decode-1 served the chat alone: " in capsys.readouterr().err
    monkeypatch.setenv("BATON_API_KEY", make_key())
    assert check(flags) == 1
    assert "401" in capsys.readouterr().err


def test_another_certificate_is_not_trusted(fleet: Fleet, tmp_path: Path) -> None:
    trustme.CA().issue_cert("fleet.example").cert_chain_pems[0].write_to_path(tmp_path / "other")
    with pytest.raises(RouterUnreachable, match="certificate"):
        get_json(f"{fleet.url}/fleet", access=RouterAccess(ADMIN_KEY, str(tmp_path / "other")))
