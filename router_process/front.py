"""The part of a router that clients reach: its checks of browsers and keys, and behind them the
API, once the fleet is there.

Owns the gate, the kept responses and the remembered answers. The HTTP port is open from the start;
until the first decode worker has determined the model, only the operators' endpoints answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from fastapi import APIRouter
from prometheus_client import CollectorRegistry

from checkpoint.texts_fingerprint import texts_fingerprint
from gateway.admission.gate import Gate
from gateway.admission.key_files import KeyFiles
from gateway.api.context import ApiLimits
from gateway.api.openai_responses.background import BackgroundRuns
from gateway.api.openai_responses.memory import ResponseMemory, records_of
from gateway.history.assembly import router_answers
from gateway.http.access import KeyCheck, access_rules
from gateway.http.browsers import BrowserCheck, browser_rules
from gateway.output.event_ids import ids_key
from gateway.parser_names import ALLOW
from gateway.shared_prefixes_file import load_shared_prefixes
from gateway.text.tokenizer import Tokenizer
from process.allocator import spare_the_collector
from process.side_tasks import keep_running
from process.store.ignored_entries import IgnoredEntries
from process.store.store_url import store_url
from router.fleet.fleet import Fleet
from router.requests.interface import ReadinessCheck, ServedModel
from router.requests.trace_json import timing_lookup
from router_process.app import AppOptions, create_app
from router_process.parts import Parts
from router_process.settings import RouterSettings
from router_process.side_work import SideWork
from router_process.startup_app import LateApp, waiting_app

log = logging.getLogger(__name__)

MIDDLE_PER_FULL = 1000
"""Collections of the middle generation between two full ones. A full collection visits every object
of every request, which takes 0.3 s for a million objects, and finds almost nothing: requests leave
no cycles."""


class Front:
    """The application `app` for the HTTP server, in which browsers and keys are checked first."""

    def __init__(
        self,
        settings: RouterSettings,
        path: Path,
        tokenizer: Tokenizer,
        parts: Parts,
        ready: ReadinessCheck,
        operators: list[APIRouter],
    ) -> None:
        """`path` is the checkpoint's folder. Raises ConfigError."""
        registry = parts.registry
        self._settings = settings
        self._path = path
        self._tokenizer = tokenizer
        self._parts = parts
        self._ready = ready
        self._operators = operators
        self._prefixes = load_shared_prefixes(settings, tokenizer)
        self._key_files = KeyFiles(registry)
        rules = access_rules(settings, self._key_files)
        self._gate = Gate(settings.max_inflight, time.monotonic, lambda: len(rules.api), registry)
        self._late = LateApp(waiting_app(registry, ready, operators, settings.root_path))
        self._responses = _responses(settings, registry, parts.ignored)
        self._answers = router_answers(
            settings,
            tokenizer,
            texts_fingerprint(path),
            registry,
            parts.ignored,
            lambda: bool(parts.report.peers.summaries),
        )
        keyed = KeyCheck(self._late, rules, registry)
        self.app = BrowserCheck(keyed, browser_rules(settings), registry)

    def work_after_answers(self, adopt: Callable[[asyncio.Task[None]], None]) -> None:
        """Pass `adopt` to the parts that work on after an answer, so that the end of the server
        waits for their tasks as for requests."""
        if self._responses is not None:
            self._responses.memory.adopt = adopt

    def side_work(self, hangup: asyncio.Event) -> list[SideWork]:
        """The work that runs beside the requests. When `hangup` is set, the key files are read
        again."""
        work = [keep_running("reading key files", lambda: self._key_files.run(hangup))]
        if self._responses is not None:
            work.append(keep_running("keeping responses", self._responses.run))
        if self._answers is not None:
            work.append(keep_running("remembering answers", self._answers.run))
        return work

    async def open_api(self) -> None:
        """Wait for the first decode worker, then serve its model's API. Raises ModelLoadError."""
        parts, settings = self._parts, self._settings
        fleet = parts.fleet
        await fleet.wait_for_decode()
        identity = fleet.identity
        assert identity is not None, "a decode worker is ready"
        name, *others = settings.served_model_name or (identity.model,)
        context = _context_of(fleet)
        model = ServedModel(name, self._path, context, int(time.time()), tuple(others))
        self._late.serve(
            create_app(
                parts.dispatcher,
                self._tokenizer,
                model,
                parts.registry,
                self._ready,
                self._options(),
            )
        )
        spare_the_collector(MIDDLE_PER_FULL)
        log.info("serving %s, context %d tokens", name, model.max_context)
        _warn_of_deprecated(settings)

    def _options(self) -> AppOptions:
        parts, settings = self._parts, self._settings
        return AppOptions(
            extra_routers=self._operators,
            timing_of=timing_lookup(parts.traces),
            limits=ApiLimits(
                settings.request_timeout_s,
                settings.max_body_bytes,
                settings.keepalive_s,
                settings.max_inflight_bytes,
                refuse_unknown=settings.unknown_fields == "refuse",
            ),
            tool_parser=settings.tool_parser,
            reasoning_parser=settings.reasoning_parser,
            allow_control_tokens=settings.control_tokens_in_text == ALLOW,
            ids_key=ids_key(settings.cluster_secret),
            tracer=parts.exporter,
            gate=self._gate,
            responses=self._responses,
            shared_prefixes=self._prefixes,
            answers=None if self._answers is None else self._answers.memory,
            root_path=settings.root_path,
            door=parts.door,
        )


def _responses(
    settings: RouterSettings, registry: CollectorRegistry, ignored: IgnoredEntries
) -> BackgroundRuns | None:
    """The memory of responses, if it is enabled."""
    if not settings.responses_store:
        return None
    records = records_of(store_url(settings), settings.cluster, settings.responses_store_bytes)
    return BackgroundRuns(ResponseMemory(records, registry, ignored), registry)


def _warn_of_deprecated(settings: RouterSettings) -> None:
    if settings.local_prefill_threshold_tokens is not None:
        log.warning(
            "local_prefill_threshold_tokens is deprecated, and the next release ignores it: the "
            "cost of a placement decides whether a decode worker computes a prompt"
        )


def _context_of(fleet: Fleet) -> Callable[[], int]:
    """A function that returns the largest context of a ready decode worker or, while there is none,
    the last known value."""
    known = fleet.max_context

    def context() -> int:
        nonlocal known
        known = fleet.max_context or known
        assert known is not None, "a decode worker was ready"
        return known

    return context
