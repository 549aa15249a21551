"""`/control/...`: changes of the fleet, for admin keys. Each change is logged with its key.

A drain goes through the store, as `baton drain` does; the worker finds it at its next lease
renewal. Settings change in this router's process only, and last until it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from console.dashboard.control_log import ControlLog
from console.dashboard.live_settings import LiveSettings
from console.dashboard.sample_prompts import SamplePrompt, SamplePrompts
from http_kit.caller import KEY_NAME
from http_kit.errors import describe
from process.number_text import exact
from process.store.drain_requests import request_drain, request_resume
from protocol.errors import InvalidRequest, RequestError, ServiceError
from protocol.registration import WorkerInfo, WorkerState
from router.fleet.fleet import Fleet

B = TypeVar("B", bound=msgspec.Struct)
Preview = Callable[[str | None], dict[str, float | None]]
MAX_BODY_BYTES = 64 * 1024


class WorkerBody(msgspec.Struct, forbid_unknown_fields=True):
    """The worker to drain, or to resume."""

    worker_id: str


class SettingBody(msgspec.Struct, forbid_unknown_fields=True):
    """A setting's new value."""

    name: str
    scope: str
    value: int | float


class PreviewBody(msgspec.Struct, forbid_unknown_fields=True):
    """A change to predict: the drain of a worker, or a setting."""

    worker_id: str | None = None
    name: str | None = None
    scope: str | None = None
    value: int | float | None = None


class PromptBody(msgspec.Struct, forbid_unknown_fields=True):
    """A test prompt, and the workers that it is to use."""

    prompt: str
    max_tokens: int = 32
    prefill: str | None = None
    decode: str | None = None


@dataclass(frozen=True)
class ControlParts:
    """The objects that the controls change; `preview` predicts the pressures without a worker."""

    redis_url: str
    cluster: str
    fleet: Fleet
    settings: LiveSettings
    prompts: SamplePrompts
    log: ControlLog
    preview: Preview


def controls_router(parts: ControlParts) -> APIRouter:
    """The routes, for an application."""
    router = APIRouter(prefix="/control")

    @router.get("/settings")
    async def get_settings() -> Response:
        return JSONResponse(parts.settings.as_json())

    @router.get("/log")
    async def get_log() -> Response:
        return JSONResponse(parts.log.as_json())

    @router.get("/key")
    async def get_key(request: Request) -> Response:
        return JSONResponse({"name": _key(request)})

    @router.post("/drain")
    async def drain(request: Request) -> Response:
        return await _answer(request, _change_worker(parts, "drain"))

    @router.post("/resume")
    async def resume(request: Request) -> Response:
        return await _answer(request, _change_worker(parts, "resume"))

    @router.post("/settings")
    async def change_setting(request: Request) -> Response:
        return await _answer(request, _change_setting(parts))

    @router.post("/preview")
    async def preview(request: Request) -> Response:
        async def predict(body: bytes, key: str) -> dict[str, Any]:
            return {"predicted": parts.preview(_read(body, PreviewBody).worker_id)}

        return await _answer(request, predict)

    @router.post("/test")
    async def send_test(request: Request) -> Response:
        return await _answer(request, _send_test(parts))

    return router


def _change_worker(parts: ControlParts, action: str) -> Any:
    async def change(body: bytes, key: str) -> dict[str, Any]:
        worker_id = _read(body, WorkerBody).worker_id
        info = parts.fleet.info(worker_id)
        refusal = _refusal(action, worker_id, info)
        if refusal is None:
            ask = request_drain if action == "drain" else request_resume
            found = await asyncio.to_thread(ask, parts.redis_url, parts.cluster, worker_id)
            refusal = None if found is not None else f"{worker_id} has left"
        words = "asked to drain" if action == "drain" else "asked to go on"
        parts.log.note(key, f"{action} {worker_id}", words if refusal is None else refusal)
        return {"accepted": refusal is None, "reason": refusal}

    return change


def _refusal(action: str, worker_id: str, info: WorkerInfo | None) -> str | None:
    """Why a worker cannot be drained or resumed; None if it can."""
    if info is None:
        return f"no worker {worker_id} is registered"
    if action == "drain":
        wanted, otherwise = WorkerState.READY, "only a ready worker can be drained"
    else:
        wanted, otherwise = WorkerState.DRAINING, "only a draining worker can go on"
    return None if info.state is wanted else f"{worker_id} is {info.state.value}: {otherwise}"


def _change_setting(parts: ControlParts) -> Any:
    async def change(body: bytes, key: str) -> dict[str, Any]:
        given = _read(body, SettingBody)
        setting = parts.settings.find(given.scope, given.name)
        value, old = setting.check(given.value), setting.read()
        applied, of = setting.write(value)
        result = f"on {applied} of {of} {setting.kind}{'' if of == 1 else 's'}"
        parts.log.note(key, f"{given.name} ({given.scope})", result, _shown(old), _shown(value))
        reason = None if applied == of else "not every worker is connected to this router"
        return {"applied": applied, "of": of, "reason": reason}

    return change


def _send_test(parts: ControlParts) -> Any:
    async def send(body: bytes, key: str) -> dict[str, Any]:
        given = _read(body, PromptBody)
        test = SamplePrompt(given.prompt, given.max_tokens, given.prefill, given.decode)
        request_id = await parts.prompts.send(test)
        parts.log.note(key, "test prompt", request_id)
        return {"request_id": request_id}

    return send


async def _answer(request: Request, act: Any) -> Response:
    """The answer of `act` to the request's body, or its error in the API's format."""
    try:
        body = await _body(request)
        return JSONResponse(await act(body, _key(request)))
    except (RequestError, ServiceError) as error:
        return describe(error, request_id="of a control").response()


async def _body(request: Request) -> bytes:
    found = bytearray()
    async for part in request.stream():
        found += part
        if len(found) > MAX_BODY_BYTES:
            raise InvalidRequest(f"the body has at most {MAX_BODY_BYTES} bytes")
    return bytes(found)


def _read(body: bytes, kind: type[B]) -> B:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the body does not fit this endpoint: {error}") from error
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error


def _key(request: Request) -> str:
    name: str = request.scope.get(KEY_NAME, "unknown")
    return name


def _shown(value: object) -> str:
    return exact(value) if value is None or isinstance(value, (int, float)) else str(value)
