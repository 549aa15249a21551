"""Addresses of the store, of routers, collectors and hubs in a form that shows no secrets.

An address may carry a password in its user part or in its query. An unescaped /, ?, # or @ in a
password moves the rest of it into another part of the parsed address, such as the port or the path.
So only well-formed addresses are shown; others are left out whole.
"""

from __future__ import annotations

import re
from urllib.parse import SplitResult, urlsplit

MALFORMED = "(malformed address)"
ESCAPES = (
    "write /, ?, #, @ and : of a user or password as %2F, %3F, %23, %40 and %3A, and an @ anywhere "
    "else as %40, too"
)
"""Advice for an address that cannot be parsed, which must not be repeated."""
_HOST = re.compile(r"[A-Za-z0-9._~%-]+|\[[0-9A-Fa-f:.]+(%[A-Za-z0-9._~-]+)?\]")
_IN_TEXT = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s\"'<>]*[^\s\"'<>.,:;)]")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")


def parsed_address(text: str) -> SplitResult | None:
    """The parts of a URL. None if its host or port is malformed, or if an @ outside of the user
    part shows that the user part has unescaped characters."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return None
    if "@" in parts.path + parts.query + parts.fragment or "\\" in text:
        return None
    host = parts.netloc.rpartition("@")[2]
    name = host.rpartition(":")[0] if port is not None else host.removesuffix(":")
    is_local = not host and parts.scheme in ("unix", "file")
    if not _SCHEME.fullmatch(parts.scheme) or not (is_local or _HOST.fullmatch(name)):
        return None
    return parts


def with_addresses_shown(text: str) -> str:
    """A text from elsewhere, such as an error, with the secrets in its addresses left out."""
    return _IN_TEXT.sub(lambda found: shown_address(found[0]), text)


def shown_address(text: str) -> str:
    """Scheme, host, port and path of a URL, for logs and errors."""
    parts = parsed_address(text)
    if parts is None:
        return MALFORMED
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"
