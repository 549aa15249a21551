"""`/dashboard/`: the page's files, read once at start, and the redirect to it from `/`.

The files hold no data, so they are open without a key. They name each other by relative addresses
only, so the page works under any path prefix that a proxy adds. The policy lets the page load from
and connect to this router only, and forbids inline scripts and styles.
"""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from http_kit.errors import HttpError
from protocol.errors import RequestError

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_PLACES = {
    "service": "Baton",
    "openai": "/v1",
    "anthropic": "/v1/messages",
    "models": "/v1/models",
    "documentation": "/docs",
    "health": "/health",
    "dashboard": "/dashboard/",
}
"""The answer to a program that asks at the root."""
_HERE = Path(__file__).parent
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    packed: bytes
    media_type: str
    etag: str


def page_files() -> dict[str, Path]:
    """The files by their address under `/dashboard/`. The page itself has the empty address."""
    files = {path.name: path for path in (_HERE / "page").iterdir() if path.suffix in _TYPES}
    vendor = {
        f"vendor/{path.name}": path
        for path in (_HERE / "vendor").iterdir()
        if path.suffix in _TYPES
    }
    return {"": files.pop("index.html"), **files, **vendor}


def pages_router(root_path: str = "") -> APIRouter:
    """The routes, for an application that clients see under `root_path`. If that is `/llm`,
    browsers may ask for `/llm` without a slash, from which a relative address would lead
    elsewhere."""
    router = APIRouter()
    places = {name: place.replace("/", f"{root_path}/", 1) for name, place in _PLACES.items()}
    page = f"{root_path}/dashboard/" if root_path else "dashboard/"
    files = {name: _read(path) for name, path in page_files().items()}

    @router.get("/")
    async def root(request: Request) -> Response:
        if "text/html" in request.headers.get("accept", ""):
            return RedirectResponse(page)
        return JSONResponse(places)

    @router.get("/dashboard")
    async def without_slash() -> Response:
        return RedirectResponse("dashboard/")

    @router.get("/dashboard/{name:path}")
    async def file(name: str, request: Request) -> Response:
        found = files.get(name)
        if found is None:
            return _not_found(request.url.path)
        return _answer(found, request)

    return router


def _read(path: Path) -> _File:
    content = path.read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return _File(content, gzip.compress(content, mtime=0), _TYPES[path.suffix], etag)


def _answer(file: _File, request: Request) -> Response:
    headers = {
        "content-security-policy": POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
        "etag": file.etag,
        "vary": "accept-encoding",
    }
    if file.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if "gzip" not in request.headers.get("accept-encoding", ""):
        return Response(file.content, headers=headers, media_type=file.media_type)
    headers["content-encoding"] = "gzip"
    return Response(file.packed, headers=headers, media_type=file.media_type)


def _not_found(path: str) -> Response:
    message = f"Not Found: GET {path}"
    return HttpError(404, message, RequestError.kind, code="not_found").response()
