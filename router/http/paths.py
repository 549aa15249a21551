"""The paths of the HTTP API by kind, for access checks, metrics and the API's description."""

from __future__ import annotations

import re

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

API_PATHS = frozenset(("/tokenize", "/detokenize", *NOT_GENERATION))
"""Paths of the API outside `/v1/`."""
RECEIPT = re.compile(r"/v1/requests/[^/]+/receipt")
"""Of a request: for the key that sent it, and for operators."""
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
COUNTED = frozenset(
    (
        "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages",
        "/v1/messages/count_tokens", "/v1/responses/input_tokens", "/v1/models",
        "/tokenize", "/detokenize", "/metrics",
        "/fleet", "/dashboard/stream", *PROBES, *DOCUMENTS,
    )
)  # fmt: skip
"""Paths that have a metrics label of their own; all others share one."""


def is_page(path: str) -> bool:
    """Whether a path belongs to the files of the operators' page, or leads there."""
    in_folder = path == "/dashboard" or path.startswith("/dashboard/")
    return path == "/" or (in_folder and path not in VIEWED)
