"""The HTTP application: the OpenAI-compatible API on top of a `Generator`."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from fastapi import APIRouter, Request
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.responses import Response

from gateway.admission.gate import Gate
from gateway.admission.shared_prefixes import SharedPrefixes
from gateway.api.anthropic.messages import messages_router
from gateway.api.checkpoint_defaults import load_sampling_defaults
from gateway.api.context import ApiContext, ApiLimits, no_timing
from gateway.api.docs_page import documents_router
from gateway.api.models import models_router
from gateway.api.openai.chat import chat_router
from gateway.api.openai.completions import completions_router
from gateway.api.openai_responses.background import BackgroundRuns
from gateway.api.openai_responses.kept_endpoints import kept_router
from gateway.api.openai_responses.responses import responses_router
from gateway.api.probes import probe_router
from gateway.api.tokenize import tokenize_router
from gateway.chat.markup import find_markup
from gateway.grammars.grammar_checker import GrammarChecker
from gateway.history.answers import AnswerMemory
from gateway.http.anthropic_errors import error_response
from gateway.http.byte_budget import ByteBudget
from gateway.http.fast_path import Application
from gateway.http.paths import meant_path
from gateway.http.request_scope import RequestScope, RequestTracer, record_of
from gateway.metrics import ApiMetrics
from gateway.parser_names import AUTO
from gateway.text.tokenizer import Tokenizer
from http_kit.door import Door
from http_kit.errors import describe
from router.requests.interface import Generator, ReadinessCheck, ServedModel, TimingLookup


@dataclass(frozen=True, slots=True)
class AppOptions:
    """Optional parts of the application: extra routes, limits on requests, traces, names of
    parsers, whether text of messages may become control tokens, the gate, the memory of responses,
    prefixes that all clients share, the memory of answers, the key of event ids, the path under
    which clients see the application, and the counts at the door. All routers have the same key of
    event ids, so that a client can resume a stream at another router."""

    extra_routers: Iterable[APIRouter] = ()
    timing_of: TimingLookup = no_timing
    limits: ApiLimits = field(default_factory=ApiLimits)
    tool_parser: str = AUTO
    reasoning_parser: str = AUTO
    allow_control_tokens: bool = False
    ids_key: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    tracer: RequestTracer | None = None
    gate: Gate | None = None
    responses: BackgroundRuns | None = None
    shared_prefixes: SharedPrefixes = field(default_factory=SharedPrefixes)
    answers: AnswerMemory | None = None
    root_path: str = ""
    door: Door | None = None


def create_app(
    generator: Generator,
    tokenizer: Tokenizer,
    model: ServedModel,
    registry: CollectorRegistry,
    ready: ReadinessCheck,
    options: AppOptions | None = None,
) -> Application:
    """The application, for an ASGI server; owns none of its arguments.

    Metrics are registered in `registry`, which `/metrics` shows. Raises ModelLoadError if the
    checkpoint's `generation_config.json` is malformed.
    """
    options = options or AppOptions()
    metrics = ApiMetrics(registry, door=options.door)
    gate = options.gate or Gate(sys.maxsize, metrics.clock)
    budget = ByteBudget(options.limits.max_inflight_bytes, registry)
    if options.gate is not None:
        budget.retry_after_s = gate.retry_after_s
    app = Application(title="Baton", openapi_url=None, redirect_slashes=False)
    scope = partial(
        RequestScope,
        metrics=metrics,
        budget=budget,
        gate=gate,
        tracer=options.tracer,
        root_path=options.root_path,
    )
    app.add_middleware(scope)
    app.add_exception_handler(HTTPException, _http_error)
    context = _api_context(generator, tokenizer, model, metrics, options)
    own = (
        completions_router(context),
        chat_router(context),
        responses_router(context, options.responses),
        kept_router(context, options.responses),
        messages_router(context),
        tokenize_router(context),
        models_router(context),
        probe_router(registry, ready),
        documents_router(options.root_path),
    )
    for router in (*own, *options.extra_routers):
        app.include_router(router)
    app.cut_short(own, scope)
    return app


def _api_context(
    generator: Generator,
    tokenizer: Tokenizer,
    model: ServedModel,
    metrics: ApiMetrics,
    options: AppOptions,
) -> ApiContext:
    """The objects that all endpoints share. Raises ModelLoadError."""
    markup = find_markup(
        tokenizer, options.tool_parser, options.reasoning_parser, options.allow_control_tokens
    )
    return ApiContext(
        generator,
        tokenizer,
        model,
        load_sampling_defaults(model.path, tokenizer.eos_id),
        metrics,
        options.limits,
        markup,
        GrammarChecker(model.path, tokenizer),
        options.ids_key,
        options.timing_of,
        options.shared_prefixes,
        options.answers,
    )


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown paths, wrong methods and similar errors, in the API's own error format."""
    path, meant = request.scope["path"], None
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        detail = f"{error.detail}: {request.method} {path}"
        meant = meant_path(path) if error.status_code == 404 else None
        if meant is not None:
            detail += f"; did you mean {meant}?"
        elif error.status_code == 405:
            detail += f"; it takes {(error.headers or {}).get('Allow')}"
        error = HTTPException(error.status_code, detail, error.headers)
    request_id = record_of(request.scope).request_id
    return error_response(describe(error, request_id), meant or path, request_id)
