"""The paths of the HTTP API by kind, for access checks, metrics and the API's description; and the
path that a client probably means when its path does not exist.

Clients get a path wrong by their base URL (`/chat/completions`, `/v1/v1/chat/completions`), by
slashes, or because they speak another server's API (`/api/chat`). Suggestions are always paths of
the API, never of operators.
"""

from __future__ import annotations

import re
from difflib import get_close_matches

GENERATION = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
NOT_GENERATION = (
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/v1/moderations",
    "/v1/audio/speech",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/images/generations",
    "/v1/images/edits",
    "/embeddings",
    "/pooling",
    "/classify",
    "/rerank",
    "/score",
)
"""Endpoints of OpenAI and vLLM that need another kind of model."""

NOT_SERVED = {
    "/v1/responses/compact": "'truncation' of /v1/responses drops old turns instead",
    **dict.fromkeys(NOT_GENERATION, "the model only generates text"),
}
"""Endpoints of others that Baton does not have, and why."""

API_PATHS = frozenset(("/tokenize", "/detokenize", *NOT_GENERATION))
"""Paths of the API outside `/v1/`."""
RECEIPT = re.compile(r"/v1/requests/[^/]+/receipt")
"""The path of a request's receipt, for the key that sent the request and for operators."""
PROBES = frozenset(("/health", "/ready", "/live", "/ping", "/version"))
DOCUMENTS = frozenset(("/openapi.json", "/docs"))
CONTROL_PREFIX = "/control/"
"""Paths that change the fleet; an admin key opens them, and nothing else does."""
VIEWED = frozenset(
    (
        "/fleet", "/doctor", "/doctor/observation", "/cache", "/requests", "/flight",
        "/dashboard/stream",
    )
)  # fmt: skip
VIEWED_PREFIX = "/requests/"
"""Paths at which operators only read."""
_LIGHT = PROBES | DOCUMENTS | VIEWED | {"/metrics", "/v1/models"}
COUNTED = frozenset(
    (
        "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages",
        "/v1/messages/count_tokens", "/v1/responses/input_tokens", "/v1/models",
        "/tokenize", "/detokenize", "/metrics",
        "/fleet", "/dashboard/stream", *PROBES, *DOCUMENTS,
    )
)  # fmt: skip
"""Paths that have a metrics label of their own; all others share one."""
_MAX_HINTED_CHARS = 200
_NAMED = (
    "/v1/messages/count_tokens", "/v1/responses/input_tokens", *GENERATION, "/v1/models",
    "/tokenize", "/detokenize", *PROBES, *DOCUMENTS,
)  # fmt: skip
_BY_TAIL = {path.removeprefix("/v1"): path for path in _NAMED}
_ELSEWHERE = {
    "/api/chat": "/v1/chat/completions",
    "/api/generate": "/v1/completions",
    "/api/tags": "/v1/models",
    "/chat": "/v1/chat/completions",
    "/complete": "/v1/completions",
    "/completion": "/v1/completions",
    "/generate": "/v1/completions",
    "/generate_stream": "/v1/completions",
    "/infill": "/v1/completions",
    "/invocations": "/v1/chat/completions",
}
"""Endpoints of Ollama, llama.cpp, TGI, SGLang and SageMaker."""
_SLASHES = re.compile(r"//+")
_CLOSE = 0.85


def is_of_api(path: str) -> bool:
    """Whether a path belongs to the clients' API."""
    return path.startswith("/v1/") or path in API_PATHS


def passes_gate(path: str) -> bool:
    """Whether requests for a path count at a gate. All paths do, including new ones, except paths
    that read no client's body and do no work on text: probes, documents, models, receipts, and the
    operators' paths."""
    is_light = (
        path in _LIGHT
        or path.startswith((VIEWED_PREFIX, CONTROL_PREFIX, "/v1/models/"))
        or RECEIPT.fullmatch(path) is not None
        or is_page(path)
    )
    return not is_light


def is_page(path: str) -> bool:
    """Whether a path belongs to the files of the operators' page, or redirects there."""
    in_folder = path == "/dashboard" or path.startswith("/dashboard/")
    return path == "/" or (in_folder and path not in VIEWED)


def meant_path(path: str) -> str | None:
    """The path of the API that an unknown path probably means; None if none is similar."""
    if len(path) > _MAX_HINTED_CHARS:
        return None
    plain = _SLASHES.sub("/", path).rstrip("/").lower()
    if plain != path and plain in _NAMED:
        return plain
    tail = f"/{plain.rpartition('/v1/')[2]}" if "/v1/" in plain else plain
    meant = _ELSEWHERE.get(plain) or _ELSEWHERE.get(tail)
    if meant is None:
        tails = [known for known in _BY_TAIL if plain.endswith(known)]
        meant = _BY_TAIL[max(tails, key=len)] if tails else None
    if meant is None:
        close = get_close_matches(tail, _BY_TAIL, n=1, cutoff=_CLOSE)
        meant = _BY_TAIL[close[0]] if close else None
    return meant if meant != path else None
