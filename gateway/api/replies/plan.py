"""What a request is to generate, and under which identity."""

from __future__ import annotations

import msgspec

from gateway.api.generation_fields import GenerationFields
from gateway.output.choices import Choice, restored_digest
from gateway.output.event_ids import Bookmark, EventCount, StreamIdentity


class Plan(msgspec.Struct, frozen=True):
    """The plan of a request: the identity of its stream or answer, and the choices to run.

    An answer holds the `num_best` most likely choices of each prompt, or all of them if None.
    `repeats_output`: the stream's last event repeats all log-probabilities, so a thread formats it.
    """

    identity: StreamIdentity
    fields: GenerationFields
    choices: list[Choice]
    num_best: int | None = None
    repeats_output: bool = False

    def bookmark(self, key: bytes, request_digest: bytes) -> Bookmark | EventCount:
        """Assigns ids to the events of the request's stream."""
        identity = self.identity
        restored = restored_digest(self.choices)
        if restored:
            identity = msgspec.structs.replace(identity, restored=restored)
        if identity.numbers_events:
            return EventCount(identity, key, request_digest)
        return Bookmark(identity, len(self.choices), key, request_digest)
