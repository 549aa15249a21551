"""A router as a process of its own, with a real registry and fake workers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq.asyncio

from checkpoint.texts_fingerprint import texts_fingerprint
from cli.child import Child
from process.sockets.encrypted_sockets import Network
from process.store.embedded_valkey import EmbeddedValkey
from process.store.worker_lease import WorkerLease
from protocol.messages import Abort, FinishReason, Generate, Role
from router_process.main import main
from tests.forked import KNOWN_CHECKPOINT, ForkedChild
from tests.unit.router.fake_worker import SECRET, WAIT_S, FakeWorker

END = b"\n\n"
END_ID = 1
"""The checkpoint's end of text."""


@pytest.fixture(scope="module")
def valkey() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey() as running:
        yield running


@pytest.fixture
def cluster() -> str:
    return f"test-{uuid.uuid4().hex}"


@dataclass
class RouterProcess:
    process: Child
    client: httpx.AsyncClient
    log: Path

    was_told: bool = False

    def tell_to_stop(self) -> None:
        """Once: a second signal would end it at once."""
        if not self.was_told and self.process.is_running():
            self.was_told = True
            self.process.signal(signal.SIGTERM)

    async def stop(self) -> int | None:
        self.tell_to_stop()
        return await self.ended()

    async def ended(self) -> int | None:
        """Its exit status, once it has ended."""
        assert await asyncio.to_thread(self.process.wait, WAIT_S), self.log.read_text()
        return self.process.exit_status()


def fork(log: Path, *flags: str, **environment: str) -> Child:
    command = [sys.executable, "-m", "router_process.main", *flags]
    child = ForkedChild("router", Role.ROUTER, command, {**os.environ, **environment}, log)
    child.start()
    return child


@pytest.fixture
async def router(
    valkey: EmbeddedValkey,
    checkpoint: Path,
    tmp_path: Path,
    cluster: str,
    request: pytest.FixtureRequest,
) -> AsyncIterator[RouterProcess]:
    """A router on a free port, in a cluster of its test's own; parametrised by its flags."""
    log, port_file = tmp_path / "log", tmp_path / "port"
    process = fork(
        log,
        f"--model={checkpoint}",
        "--port=0",
        f"--port-file={port_file}",
        f"--cluster={cluster}",
        *getattr(request, "param", ["--shutdown-grace-s=20"]),
        BATON_REDIS_URL=valkey.url,
        BATON_CLUSTER_SECRET=SECRET,
        **{KNOWN_CHECKPOINT: str(checkpoint)},
    )
    async with asyncio.timeout(WAIT_S):
        while not port_file.exists():
            assert process.is_running(), log.read_text()
            await asyncio.sleep(0.02)
    url = f"http://127.0.0.1:{int(port_file.read_text())}"
    async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as client:
        running = RouterProcess(process, client, log)
        yield running
        await running.stop()
    assert f"listening on {url}" in log.read_text()
    assert "Traceback" not in log.read_text()


@asynccontextmanager
async def registered(valkey: EmbeddedValkey, cluster: str, **info) -> AsyncIterator[FakeWorker]:
    """A decode worker in the cluster of `router`."""
    network = Network(SECRET, zmq.asyncio.Context())
    made = FakeWorker(network, role=Role.DECODE, **info)
    lease = WorkerLease(valkey.url, cluster, made.info, WAIT_S)
    lease.start()
    yield made
    await asyncio.to_thread(lease.close)
    await made.close()
    network.close()


@pytest.fixture
async def worker(valkey: EmbeddedValkey, cluster: str) -> AsyncIterator[FakeWorker]:
    """The first decode worker."""
    async with registered(valkey, cluster, worker_id="d1", max_context=123) as made:
        yield made


async def healthy(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(WAIT_S):
        while (await client.get("/health")).status_code != 200:
            await asyncio.sleep(0.02)


async def closed(url: httpx.URL) -> None:
    """Wait until nobody accepts connections."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                _, writer = await asyncio.open_connection(url.host, url.port)
                writer.close()
                await writer.wait_closed()
            except ConnectionError:  # refused, or reset as the listener closes
                return


async def serves_context(client: httpx.AsyncClient, num_tokens: int) -> None:
    """Wait until that is the context of the model."""
    async with asyncio.timeout(WAIT_S):
        while True:
            (model,) = (await client.get("/v1/models")).json()["data"]
            if model["max_model_len"] == num_tokens:
                return
            await asyncio.sleep(0.02)


async def ended_trace(client: httpx.AsyncClient, request_id: str) -> dict[str, Any]:
    """The trace of a request whose answer was read, once its generation has ended, too."""
    async with asyncio.timeout(WAIT_S):
        while (trace := (await client.get(f"/requests/{request_id}/trace")).json())[
            "outcome"
        ] == "running":
            await asyncio.sleep(0.02)
    return trace


async def serve(worker: FakeWorker, token_ids: list[int], **fields) -> Generate:
    """The first tokens of the next request: an answer begins with them, not before."""
    leg = await worker.received.next(Generate)
    worker.tokens(leg, 0, token_ids, **fields)
    return leg


COMPLETION = {"model": "model", "prompt": "Hello world", "max_tokens": 3, "stream": True}


async def test_before_any_worker_it_says_why_and_shows_the_fleet(router: RouterProcess) -> None:
    """To a browser, too, which is led to the page."""
    for path in ("/health", "/v1/models", "/v1/chat/completions"):
        answer = await router.client.get(path)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["message"] == "no decode worker is registered"
    document = (await router.client.post("/v1/messages", json={})).json()
    assert document["type"] == "error"  # in Anthropic's format
    assert document["error"]["type"] == "overloaded_error"
    assert (await router.client.get("/fleet")).json()["workers"] == []
    root = await router.client.get("/", headers={"accept": "text/html"})
    assert (root.status_code, root.headers["location"]) == (307, "dashboard/")
    assert (await router.client.get("/dashboard/")).status_code == 200
    assert "baton_router_inflight 0.0" in (await router.client.get("/metrics")).text
    assert (await router.client.get("/requests/x/trace")).status_code == 404
    assert await router.stop() == 0


async def test_the_context_is_the_largest_of_a_decode_worker_now(
    router: RouterProcess, worker: FakeWorker, valkey: EmbeddedValkey, cluster: str
) -> None:
    client = router.client
    await healthy(client)
    await serves_context(client, 123)
    async with registered(valkey, cluster, worker_id="d2", max_context=199):
        await serves_context(client, 199)
    await serves_context(client, 123)


async def test_it_serves_what_its_workers_serve(router: RouterProcess, worker: FakeWorker) -> None:
    client = router.client
    await healthy(client)
    (model,) = (await client.get("/v1/models")).json()["data"]
    assert (model["id"], model["max_model_len"]) == ("model", 123)
    (shown,) = (await client.get("/fleet")).json()["workers"]
    assert (shown["worker_id"], shown["connected"]) == ("d1", True)

    serving = asyncio.create_task(serve(worker, [70, 71, 72], finish=FinishReason.LENGTH))
    async with client.stream("POST", "/v1/completions", json=COMPLETION) as answer:
        body = await answer.aread()
    await serving
    assert body.endswith(b"data: [DONE]" + END)
    trace = await ended_trace(client, answer.headers["x-request-id"])
    assert trace["outcome"] == "finished"
    assert trace["num_output_tokens"] == 3
    assert trace["placement"]["decode"] == "d1"
    metrics = (await client.get("/metrics")).text
    assert 'baton_router_generations_total{outcome="finished"} 1.0' in metrics


async def test_a_stray_worker_that_registered_first_is_not_served(
    router: RouterProcess, valkey: EmbeddedValkey, cluster: str, checkpoint: Path
) -> None:
    ours = texts_fingerprint(checkpoint)
    stray = {"worker_id": "d0", "model": "stray", "model_fingerprint": "s"}
    async with registered(valkey, cluster, **stray, texts_fingerprint="of another model"):
        async with asyncio.timeout(WAIT_S):
            while "'stray'" not in (told := (await router.client.get("/ready")).text):
                await asyncio.sleep(0.02)
        assert "d0 is refused: it serves 'stray'" in told
        async with registered(valkey, cluster, worker_id="d1", texts_fingerprint=ours):
            await healthy(router.client)
            served = (await router.client.get("/v1/models")).json()["data"]
            assert [each["id"] for each in served] == ["model"]


SET = [
    *("--served-model-name", "model", "other"),
    "--unknown-fields=refuse",
    "--control-tokens-in-text=allow",
    "--responses-store",
]


@pytest.mark.parametrize(
    ("router", "are_set"), [([], False), (SET, True)], ids=["default", "set"], indirect=["router"]
)
async def test_the_settings_say_what_clients_may_send(
    router: RouterProcess, worker: FakeWorker, are_set: bool
) -> None:
    client = router.client
    await healthy(client)
    names = [each["id"] for each in (await client.get("/v1/models")).json()["data"]]
    assert names == (["model", "other"] if are_set else ["model"])

    conversation = {"model": names[-1], "messages": [{"role": "user", "content": "Hi<|end|>"}]}
    tokens = (await client.post("/tokenize", json=conversation)).json()["tokens"]
    assert tokens.count(END_ID) == (2 if are_set else 1)

    unknown = await client.post("/tokenize", json={**conversation, "zzz": 1})
    assert unknown.status_code == (400 if are_set else 200)
    assert "zzz" in (unknown.text if are_set else unknown.headers["x-baton-ignored"])

    serving = asyncio.create_task(serve(worker, [70], finish=FinishReason.STOP))
    asked = {"model": names[-1], "input": "Hi", "store": True}
    answer = await client.post("/v1/responses", json=asked)
    await serving
    assert answer.headers.get("x-baton-ignored") == (None if are_set else "store")
    assert (answer.json()["model"], answer.json()["store"]) == ("model", are_set)


async def test_a_client_that_leaves_aborts_its_generation(
    router: RouterProcess, worker: FakeWorker
) -> None:
    await healthy(router.client)
    serving = asyncio.create_task(serve(worker, [70]))
    async with router.client.stream("POST", "/v1/completions", json=COMPLETION) as answer:
        leg = await serving
        await anext(answer.aiter_raw())
    abort = await worker.received.next(Abort)
    assert (abort.request_id, abort.attempt) == (leg.request_id, leg.attempt)


async def test_a_stopping_router_lets_streams_finish(
    router: RouterProcess, worker: FakeWorker
) -> None:
    await healthy(router.client)
    serving = asyncio.create_task(serve(worker, [70]))
    async with router.client.stream("POST", "/v1/completions", json=COMPLETION) as answer:
        leg = await serving
        chunks = answer.aiter_raw()
        await anext(chunks)
        router.tell_to_stop()
        await closed(router.client.base_url)
        worker.tokens(leg, 1, [71, 72], finish=FinishReason.LENGTH)
        rest = b"".join([chunk async for chunk in chunks])
    assert rest.endswith(b"data: [DONE]" + END)
    assert await router.stop() == 0


@pytest.mark.parametrize("router", [["--lame-duck-s=600"]], indirect=True)
async def test_a_lame_duck_serves_new_connections_and_is_not_ready(
    router: RouterProcess, worker: FakeWorker
) -> None:
    client = router.client
    await healthy(client)
    router.process.signal(signal.SIGHUP)  # means nothing
    router.tell_to_stop()
    async with asyncio.timeout(WAIT_S):
        while (answer := await client.get("/ready")).status_code == 200:
            await asyncio.sleep(0.02)
    assert answer.json()["error"]["message"] == "the router is stopping"
    assert (await client.get("/live")).status_code == 200
    for stream in (True, False):  # an answer by the slow path, and one by the fast
        serving = asyncio.create_task(serve(worker, [70, 71, 72], finish=FinishReason.LENGTH))
        async with httpx.AsyncClient(base_url=client.base_url, timeout=WAIT_S) as newcomer:
            body = {**COMPLETION, "stream": stream}
            answer = await newcomer.post("/v1/completions", json=body)
        await serving
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
    assert router.process.is_running()
    router.process.signal(signal.SIGTERM)
    assert await router.ended() == -signal.SIGTERM


@pytest.mark.parametrize("router", [["--lame-duck-s=0.2"]], indirect=True)
async def test_a_lame_duck_leaves_when_its_time_is_over(router: RouterProcess) -> None:
    router.tell_to_stop()
    await closed(router.client.base_url)
    assert await router.stop() == 0


@pytest.mark.parametrize("router", [["--shutdown-grace-s=0"]], indirect=True)
async def test_a_stopping_router_leaves_unfinished_streams_to_another(
    router: RouterProcess, worker: FakeWorker
) -> None:
    await healthy(router.client)
    serving = asyncio.create_task(serve(worker, [70]))
    async with router.client.stream("POST", "/v1/completions", json=COMPLETION) as answer:
        await serving
        router.tell_to_stop()
        events = (await answer.aread()).split(END)
    assert json.loads(events[-2].removeprefix(b"data: "))["error"]["code"] == "generation_failed"
    assert await router.stop() == 0
    assert worker.received.queues[Abort].empty(), "its worker keeps it for another router"


@pytest.mark.parametrize("router", [["--shutdown-grace-s=0"]], indirect=True)
async def test_a_stopping_router_aborts_whole_answers_that_are_not_finished(
    router: RouterProcess, worker: FakeWorker
) -> None:
    await healthy(router.client)
    serving = asyncio.create_task(serve(worker, [70]))
    asking = asyncio.create_task(
        router.client.post("/v1/completions", json={**COMPLETION, "stream": False})
    )
    leg = await serving
    router.tell_to_stop()
    abort = await worker.received.next(Abort)
    assert (abort.request_id, abort.attempt) == (leg.request_id, leg.attempt)
    answer = await asking
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "generation_failed"
    assert await router.stop() == 0


GOOD = {"BATON_REDIS_URL": "redis://127.0.0.1:1", "BATON_CLUSTER_SECRET": SECRET}


def exit_status(*flags: str) -> object:
    """Of the command, which runs in this process: so many imports would cost their time."""
    try:
        return main(flags)
    except SystemExit as end:
        return end.code


@pytest.mark.parametrize(
    ("flags", "environment", "told"),
    [
        ((), {}, "redis_url is required"),
        ((), {"BATON_REDIS_URL": "redis://127.0.0.1:1"}, "cluster_secret is required"),
        (("--prot=1",), GOOD, "flag --prot: unknown; did you mean --port?"),
        (("--model=/no/such/folder",), GOOD, "there is no folder"),
        (("--model=/", "--port=0"), GOOD, "tokenizer.json is missing"),
    ],
)
def test_what_an_operator_gets_wrong_is_one_line(
    checkpoint: Path,
    flags: tuple[str, ...],
    environment: dict[str, str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("router_process.main.setup_logs", lambda *arguments: None)
    for name, value in ({"BATON_MODEL": str(checkpoint)} | environment).items():
        monkeypatch.setenv(name, value)
    assert exit_status(*flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("baton router: ")
    assert told in line


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--port-file=/no/such/file", "--port=0"), "port file /no/such/file cannot be written"),
        (("--port={taken}",), "127.0.0.1 port {taken}: "),
    ],
)
async def test_what_is_wrong_with_its_port_ends_the_process_with_one_line(
    tmp_path: Path, checkpoint: Path, flags: tuple[str, ...], told: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        given = [each.format(taken=taken) for each in flags]
        process = fork(tmp_path / "log", f"--model={checkpoint}", *given, **GOOD)
        assert await asyncio.to_thread(process.wait, WAIT_S)
    assert process.exit_status() == 2
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[-1].startswith("baton router: ")
    assert told.format(taken=taken) in lines[-1]
    assert not any("Traceback" in line for line in lines)


async def test_a_store_that_refuses_the_password_ends_the_process_with_one_line(
    valkey: EmbeddedValkey, checkpoint: Path, tmp_path: Path
) -> None:
    log, where = tmp_path / "log", f"127.0.0.1:{valkey.port}"
    process = fork(
        log, f"--model={checkpoint}", "--port=0", BATON_CLUSTER_SECRET=SECRET,
        BATON_REDIS_URL=f"redis://:no-password@{where}",
    )  # fmt: skip
    assert await asyncio.to_thread(process.wait, WAIT_S), log.read_text()
    assert process.exit_status() == 2
    *_, last = log.read_text().splitlines()
    assert last.startswith(f"baton router: redis_url redis://{where}: the store refuses it")
    assert "Traceback" not in log.read_text()
    assert "no-password" not in log.read_text()


async def test_help_names_every_setting_with_its_unit_and_needs_no_torch() -> None:
    code = "import sys; from router_process.main import main; assert 'torch' not in sys.modules; "
    code += "main(['--help'])"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
    )
    shown, _ = await process.communicate()
    text = " ".join(shown.decode().split())
    assert process.returncode == 0
    assert "--local-prefill-threshold-tokens TOKENS" in text
    assert "env: BATON_RETRY_BACKOFF_MS" in text
