"""nginx and haproxy with plain configurations in front of the fleet: answers, streams that come
piece by piece, and clients that leave."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from baton_fleet import FLEET, LONG, MODEL, aborted, free_port, proxy

NGINX = """\
daemon off; pid {folder}/pid; error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
    uwsgi_temp_path {folder}; scgi_temp_path {folder};
    server {{
        listen 127.0.0.1:{port};
        location / {{ proxy_pass {fleet}; }}
    }}
}}
"""
HAPROXY = """\
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
    option abortonclose
listen baton
    bind 127.0.0.1:{port}
    server fleet {authority}
"""
WAIT_S = 10.0


@contextmanager
def proxied(command: list[str], text: str) -> Iterator[httpx.Client]:
    """A client of a proxy that runs with this configuration."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "configuration"
        authority = FLEET.removeprefix("http://")
        path.write_text(text.format(folder=folder, port=port, fleet=FLEET, authority=authority))
        with (
            proxy([*command, str(path)], port, "/health", WAIT_S) as url,
            httpx.Client(base_url=url, timeout=60) as client,
        ):
            yield client


def body(text: str, **fields: object) -> dict[str, object]:
    """A request for a chat completion."""
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


def converse(client: httpx.Client) -> None:
    """Answers, whole and as streams, and requests that are left in the middle."""
    path = "/v1/chat/completions"
    answer = client.post(path, json=body("What is a lambda?", max_tokens=20))
    assert answer.json()["usage"]["completion_tokens"] == 20
    large = body("What is a lambda?", max_tokens=5, padding="x" * 400_000)
    assert client.post(path, json=large).status_code == 200
    asked = body("What is a lambda?", max_tokens=20, stream=True)
    with client.stream("POST", path, json=asked) as stream:
        pieces = list(stream.iter_raw())
    assert len(pieces) > 1, "the stream came at once"
    assert pieces[-1].endswith(b"data: [DONE]\n\n")
    long = body(LONG, min_tokens=3000, stream=True)
    with aborted(), client.stream("POST", path, json=long) as stream:
        next(stream.iter_raw())
    for padding in ("", "x" * 400_000):
        long = body(LONG, min_tokens=3000, padding=padding)
        with aborted():
            try:
                client.post(path, json=long, timeout=0.3)
            except httpx.ReadTimeout:
                continue
            raise AssertionError("the answer came too early")


for command, text in ((["nginx", "-c"], NGINX), (["haproxy", "-f"], HAPROXY)):
    with proxied(command, text) as client:
        converse(client)
