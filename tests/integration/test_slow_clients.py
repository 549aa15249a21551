"""A client that stops reading is paused, then cut, and its request ends on every worker."""

from __future__ import annotations

import json
import re
import socket
from urllib.parse import urlsplit

import psutil

from cli.fleet import Fleet
from tests.http_client import HTTP
from tests.integration.fleets import assert_idle, complete, counters, running_fleet, wait_for
from tests.integration.reference import DEMO_MODEL, NUM_TOKENS, Reference

NUM_CLIENTS = 1
NUM_CHOICES = 16
MAX_TOKENS = 1500
MAX_GROWTH_BYTES = 64 * 2**20


def test_clients_that_stop_reading_hold_nothing(references: list[Reference]) -> None:
    with running_fleet({"BATON_CLIENT_STALL_S": "0.5"}, num_blocks=2048) as fleet:
        complete(fleet, list(references[9].prompt), max_tokens=NUM_TOKENS)
        before = counters(fleet, "decode-1")["decode_tokens"]
        router = psutil.Process(fleet.processes["router"].pid)
        resident = router.memory_info().rss
        clients = [stream_unread(fleet) for _ in range(NUM_CLIENTS)]
        wait_for("the cuts", lambda: num_cut(fleet) == NUM_CLIENTS, timeout_s=60.0)
        assert router.memory_info().rss - resident < MAX_GROWTH_BYTES
        assert_idle(fleet)
        generated = counters(fleet, "decode-1")["decode_tokens"] - before
        assert 0 < generated < NUM_CLIENTS * NUM_CHOICES * MAX_TOKENS, "it went on to the end"
        answer = complete(fleet, list(references[9].prompt), max_tokens=NUM_TOKENS)
        assert answer["choices"][0]["token_ids"] == list(references[9].output)
        for client in clients:
            client.close()


def stream_unread(fleet: Fleet) -> socket.socket:
    """Asks for a long stream with large events, and never reads."""
    body = json.dumps(
        {
            "model": DEMO_MODEL.name,
            "prompt": list(range(5, 25)),
            "max_tokens": MAX_TOKENS,
            "n": NUM_CHOICES,
            "logprobs": 20,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    parts = urlsplit(fleet.url)
    client.connect((parts.hostname, parts.port))
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    client.sendall(head.encode() + body)
    return client


def num_cut(fleet: Fleet) -> float:
    metrics = HTTP.get(f"{fleet.url}/metrics").raise_for_status().text
    found = re.search(r'connections_cut_total\{reason="answer not read in time"\} (\S+)', metrics)
    return float(found[1]) if found else 0.0
