"""The paths of the HTTP API by kind, for access checks, metrics and the API's description."""

from __future__ import annotations

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
PROBES = frozenset(("/health", "/ready", "/live", "/ping", "/version"))
DOCUMENTS = frozenset(("/openapi.json", "/docs"))
COUNTED = frozenset(
    (
        "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages",
        "/v1/messages/count_tokens", "/v1/models", "/tokenize", "/detokenize", "/metrics",
        "/fleet", *PROBES, *DOCUMENTS,
    )
)  # fmt: skip
"""Paths that have a metrics label of their own; all others share one."""
