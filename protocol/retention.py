"""A client's hint that it will soon send this prefix again, so that the prefix's cached blocks
should stay for a while."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

MAX_SECONDS = 86_400
MAX_PRIORITY = 100
USUAL_PRIORITY = 50


class RetentionHint(msgspec.Struct, frozen=True):
    """Keep the blocks for `seconds` after the request, as far as there is room. Those of a higher
    `priority` stay longer."""

    seconds: Annotated[int, Meta(ge=1, le=MAX_SECONDS)]
    priority: Annotated[int, Meta(ge=1, le=MAX_PRIORITY)] = USUAL_PRIORITY
