"""`/openapi.json`, and `/docs`, a page that shows it and loads nothing from other hosts.

The page renders the document as text, never as markup, and may connect to this router only.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

from gateway.api.openapi import openapi_json

_PAGE = Path(__file__).with_name("docs.html")
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def documents_router(root_path: str = "") -> APIRouter:
    """The endpoints, for an application that clients see under `root_path`."""
    router = APIRouter()
    page = _PAGE.read_bytes()

    async def openapi() -> Response:
        return Response(openapi_json(root_path), media_type="application/json")

    async def docs() -> Response:
        headers = {"content-security-policy": _POLICY, "x-content-type-options": "nosniff"}
        return Response(page, headers=headers, media_type="text/html")

    router.add_api_route("/openapi.json", openapi, methods=["GET"])
    router.add_api_route("/docs", docs, methods=["GET"])
    return router
