"""One simulated request and its course."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import nan

from kv_transfer.handoff.key import HandoffKey


@dataclass(slots=True)
class Request:
    """A request and its course; times are those of the simulation, in seconds, `nan` until then.

    - `content`: digests of its blocks, those of its output included where they are known.
    - `prefill`: the worker that computed the prompt for `decode`; None if `decode` computed the
      prompt itself.
    - `sent_blocks` blocks with `sent_bytes` were moved to `decode`; for `write_s` a write was under
      way, the last one until `write_ended`.
    - `exposed_s`: how long the first token was known before the request could continue.
    - `failure`: why the router or a worker refused it; "" if it did not.
    """

    number: int
    session: str
    num_prompt: int
    num_output: int
    content: Sequence[bytes]
    arrival: float
    share: str = ""
    priority: int = 0
    router: str = ""
    decode: str = ""
    prefill: str | None = None
    rule: str = ""
    prompt_done: float = nan
    first_token: float = nan
    end: float = nan
    cached_tokens: int = 0
    sent_bytes: float = 0.0
    sent_blocks: int = 0
    write_s: float = 0.0
    write_ended: float = 0.0
    exposed_s: float = 0.0
    num_preemptions: int = 0
    failure: str = ""
    key: HandoffKey = field(init=False)

    def __post_init__(self) -> None:
        self.key = HandoffKey(str(self.number), 0)

    @property
    def ttft_s(self) -> float:
        """Seconds from the request's arrival to its first token."""
        return self.first_token - self.arrival

    @property
    def tpot_s(self) -> float:
        """The mean time of an output token after the first; 0 if there is none."""
        return (self.end - self.first_token) / (self.num_output - 1) if self.num_output > 1 else 0.0
