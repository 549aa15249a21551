"""A scripted generator behind a real uvicorn, and the checkpoint folder they serve."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import uvicorn
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from gateway.api.context import ApiLimits
from gateway.api.openai_responses.background import BackgroundRuns
from gateway.api.openai_responses.memory import ResponseMemory, records_of
from gateway.http.access import AccessRules, KeyCheck
from gateway.http.connection import BoundedProtocols
from gateway.http.connection_limits import ConnectionLimits
from gateway.text.tokenizer import Tokenizer
from protocol.messages import FinishReason
from protocol.sampling import PromptLogprobs, TokenLogprobs
from router.requests.interface import DeltaSink, GenerationRequest, ServedModel, TokenDelta
from router.requests.trace import RequestTrace
from router.requests.trace_json import timing_lookup
from router_process.app import AppOptions, create_app

MODEL = "tiny"
MAX_CONTEXT = 200
MAX_BODY_BYTES = 100_000
TIMEOUT_S = 60.0
CHAT_TEMPLATE = """\
{%- for message in messages %}
{%- if message.role == 'tool' and not message.tool_call_id %}
{{- raise_exception('a tool message needs tool_call_id') }}
{%- endif %}
{{- '<|start|>' + message.role + '\\n' + message.content + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant\\n' }}{%- endif %}
{%- if mood is defined %}{{- mood }}{%- endif %}
"""
CORPUS = ["Hello world, hello there. A stop string stops.", "one two three", "wörld"]


def write_checkpoint(path: Path) -> Path:
    """Trains a byte-level BPE of 285 tokens and writes the files around it."""
    tokenizer = HfTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=285,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|start|>", "<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "bos_token": None, "chat_template": CHAT_TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "config.json").write_text(json.dumps({"vocab_size": 10_000, "eos_token_id": 0}))
    (path / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "top_k": 20}))
    return path


class Forever:
    """A step that never ends: only an abort gets past it."""


class Pause:
    """A step that ends when the test says so."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._event = asyncio.Event()
        self._is_over = False

    def end(self) -> None:
        """End the pause. May be called from any thread, before or while a generation waits here."""
        self._is_over = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self) -> None:
        self._loop = asyncio.get_running_loop()
        if not self._is_over:
            await self._event.wait()


Step = TokenDelta | Exception | Forever | Pause


class ScriptedGenerator:
    """Plays `script(request)` step by step; knows what was asked for and what still runs."""

    def __init__(self, script: Callable[[GenerationRequest], Iterable[Step]]) -> None:
        self.script = script
        self.requests: list[GenerationRequest] = []
        self._changed = threading.Condition()
        self._active: set[str] = set()
        self.most_active = 0

    async def generate(self, request: GenerationRequest, sink: DeltaSink) -> list[int]:
        self.requests.append(request)
        token_ids: list[int] = []
        self._note(lambda: self._active.add(request.request_id))
        try:
            for step in self.script(request):
                await asyncio.sleep(0)
                if isinstance(step, Forever):
                    await asyncio.Event().wait()
                elif isinstance(step, Pause):
                    await step.wait()
                elif isinstance(step, Exception):
                    raise step
                else:
                    while sink.is_full:
                        await sink.wait_room()
                    token_ids += step.token_ids
                    if not sink.take(step) or step.finish:
                        break
        finally:
            self._note(lambda: self._active.discard(request.request_id))
        return token_ids

    def wait_idle(self) -> None:
        """Returns once no generation runs; fails after a long while."""
        self._wait(lambda: not self._active)

    def wait_active(self, count: int) -> None:
        """Returns once `count` generations run."""
        self._wait(lambda: len(self._active) == count)

    def _wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, TIMEOUT_S), f"still active: {self._active}"

    def _note(self, change: Callable[[], object]) -> None:
        with self._changed:
            change()
            self.most_active = max(self.most_active, len(self._active))
            self._changed.notify_all()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, runs: BackgroundRuns | None) -> None:
        super().__init__(config)
        self.up = threading.Event()
        self._runs = runs
        self._renewing: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._runs is not None:
            self._runs.memory.adopt = self._adopt
            self._renewing = asyncio.create_task(self._runs.run())
        self.up.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait((self._renewing,))

    def _adopt(self, task: asyncio.Task[None]) -> None:
        self.server_state.tasks.add(task)
        task.add_done_callback(self.server_state.tasks.discard)


class LiveApi:
    """The application on 127.0.0.1 and a free port, in a thread of its own."""

    def __init__(
        self,
        path: Path,
        tokenizer: Tokenizer,
        limits: ApiLimits = ApiLimits(max_body_bytes=MAX_BODY_BYTES),  # noqa: B008 - frozen
        max_context: int = MAX_CONTEXT,
        other_names: tuple[str, ...] = (),
        rules: AccessRules | None = None,
        **options: Any,
    ) -> None:
        """`options` are those of the application; with `redis_url` it keeps responses there."""
        redis_url = options.pop("redis_url", None)
        self.tokenizer = tokenizer
        self.generator = ScriptedGenerator(lambda request: [])
        self.unready_reason: str | None = None
        self.traces: dict[str, RequestTrace] = {}
        self.registry = CollectorRegistry()
        self.runs: BackgroundRuns | None = None
        if redis_url is not None:
            memory = ResponseMemory(records_of(redis_url, "tests", 1 << 26), self.registry)
            self.runs = BackgroundRuns(memory, self.registry)
        app = create_app(
            self.generator,
            tokenizer,
            ServedModel(MODEL, path, lambda: max_context, 1_700_000_000, other_names),
            self.registry,
            ready=lambda: self.unready_reason,
            options=AppOptions(
                limits=limits, timing_of=timing_lookup(self.traces), responses=self.runs, **options
            ),
        )
        self.app = app if rules is None else KeyCheck(app, rules, self.registry)

    def __enter__(self) -> LiveApi:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = uvicorn.Config(
            self.app,
            loop="uvloop",
            http=BoundedProtocols(ConnectionLimits(), CollectorRegistry()).factory(),
            lifespan="off",
            log_level="error",
            timeout_graceful_shutdown=round(TIMEOUT_S / 2),
        )
        self._server = _Server(config, self.runs)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],))
        self._thread.start()
        assert self._server.up.wait(TIMEOUT_S)
        accepted = {"accept": "text/event-stream, */*"}  # so that events have ids
        self.http = httpx.Client(base_url=self.url, timeout=TIMEOUT_S, headers=accepted)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.http.close()
        self._server.should_exit = True
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()
        self._socket.close()

    def reset(self) -> None:
        """Forgets requests; the script becomes the word "Hello" and the end of text."""
        self.unready_reason = None
        self.generator.requests.clear()
        self.traces.clear()
        self.generator.most_active = 0
        self.says("Hello")

    def settle(self, condition: Callable[[], bool]) -> None:
        """Gives the server turns, one request each, until `condition` holds."""
        end = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < end, "the server did not settle"
            assert self.http.get("/v1/models").status_code == 200

    def says(self, text: str, finish: FinishReason = FinishReason.STOP) -> None:
        """Makes every generation give this text, one token a delta."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        self.generator.script = lambda request: token_steps(request, ids, finish, self.tokenizer)

    def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        """Posts a JSON body."""
        return self.http.post(path, json=body, headers=headers)

    def complete(self, prompt: object = "Hi", **fields: object) -> httpx.Response:
        """`/v1/completions`."""
        return self.post("/v1/completions", {"model": MODEL, "prompt": prompt, **fields})

    def chat(self, content: object = "Hi", **fields: object) -> httpx.Response:
        """`/v1/chat/completions` with one message of the user."""
        messages = [{"role": "user", "content": content}]
        body = {"model": MODEL, "messages": messages, **fields}
        return self.post("/v1/chat/completions", body)

    def metric(self, name: str, **labels: str) -> float:
        """A sample's value; 0 where it does not exist yet."""
        return self.registry.get_sample_value(name, labels) or 0.0


def token_steps(
    request: GenerationRequest, ids: list[int], finish: FinishReason, tokenizer: Tokenizer
) -> list[Step]:
    """One delta a token, cut at `max_tokens`; ends with the end of text for STOP."""
    tokens = ids[: request.sampling.max_tokens]
    if len(tokens) < len(ids):
        finish = FinishReason.LENGTH
    elif finish is FinishReason.STOP:
        assert tokenizer.eos_id is not None
        tokens = [*tokens, tokenizer.eos_id]
    top = request.sampling.logprobs
    last = len(tokens) - 1
    return [
        TokenDelta(
            [token_id],
            None if top is None else [fake_logprobs(token_id, top)],
            finish if place == last else None,
            cached_tokens=2,
            prompt_logprobs=fake_prompt_logprobs(request) if place == 0 else None,
        )
        for place, token_id in enumerate(tokens)
    ]


def fake_logprobs(token_id: int, count: int) -> TokenLogprobs:
    """The token itself as the most likely one, then its successors."""
    return TokenLogprobs(-0.5, tuple((token_id + step, -0.5 - step) for step in range(count)))


def fake_prompt_logprobs(request: GenerationRequest) -> PromptLogprobs | None:
    """Each token has rank 7 and log-probability -4; the likely ones are 40, 41 and so on, at -0.5,
    -1.5 and so on."""
    count, rows = request.sampling.prompt_logprobs, len(request.token_ids) - 1
    if count is None:
        return None
    return PromptLogprobs(
        count,
        struct.pack(f"<{rows}f", *[-4.0] * rows),
        struct.pack(f"<{rows}i", *[7] * rows),
        struct.pack(f"<{count}i", *range(40, 40 + count)) * rows,
        struct.pack(f"<{count}f", *(-0.5 - place for place in range(count))) * rows,
    )


def events_of(text: str) -> list[dict[str, object]]:
    """The JSON documents of an event stream that ended with `[DONE]`."""
    lines = text.split("\n")
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]
