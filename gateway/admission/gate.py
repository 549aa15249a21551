"""The gate: counts sequences in flight, in all, by tenant and by address, and refuses requests
beyond the limits.

A request that may not pass is refused before its body is read. It counts from the end of its body,
as one sequence, so that uploads that do not end take no places; it takes more room once it is known
how many sequences it starts. `Retry-After` comes from the rate at which sequences end and from how
many other requests were refused and will come back. Requests that generate nothing, such as
tokenizing, have a gate of their own, with the same limits. Knows no HTTP and reads no clock.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from prometheus_client import CollectorRegistry, Counter

from gateway.admission.address_shares import AddressShares
from gateway.admission.recent import WINDOW_S, RecentCount
from http_kit.tenant import EVERYBODY, Tenant
from protocol.errors import InvalidRequest, Overloaded, TooManyRequests, retry_after

log = logging.getLogger(__name__)

LOG_INTERVAL_S = 1.0


@dataclass(slots=True)
class _Flow:
    """Sequences in flight, and the sequences that ended or were refused in the last seconds."""

    in_flight: int = 0
    ended: RecentCount = field(default_factory=RecentCount)
    refused: RecentCount = field(default_factory=RecentCount)
    num_unlogged: int = 0
    log_at: float = 0.0

    def refuse(self, now: float, who: str, counted: str) -> int:
        """Note a refusal, and log it unless the last line is too recent. Returns the seconds after
        which the client may try again."""
        retry_s = self.retry_after_s(now)
        self.refused.add(now)
        self.num_unlogged += 1
        if now >= self.log_at:
            log.warning(
                "%s has %d %s in flight; requests refused since the last such line: %d",
                who, self.in_flight, counted, self.num_unlogged,
            )  # fmt: skip
            self.log_at, self.num_unlogged = now + LOG_INTERVAL_S, 0
        return retry_s

    def retry_after_s(self, now: float) -> int:
        """Seconds until a place is likely to be free for a request that is refused now. The places
        that became free within the window are shared among all requests refused in it; if none
        became free, one is assumed."""
        waiting, ended = self.refused.total(now) + 1, self.ended.total(now)
        return retry_after(waiting * WINDOW_S / max(1, ended))


@dataclass(frozen=True, slots=True)
class RateLimit:
    """A client's limit, as its answers report it. A place is likely to be free in `reset_s`."""

    limit: int
    remaining: int
    reset_s: int


class Gate:
    """Counts what is in flight. `num_keys` returns how many keys the router has now."""

    def __init__(
        self,
        max_inflight: int,
        clock: Callable[[], float],
        num_keys: Callable[[], int] = lambda: 0,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self.max_inflight = max_inflight
        self._clock = clock
        self._num_keys = num_keys
        self._counted = "sequences"
        self._all = _Flow()
        self._by_tenant: dict[str, _Flow] = {}
        self._addresses = AddressShares()
        self._refused = Counter(
            "baton_http_gate_refused",
            "Requests refused because the router (full) or their key "
            "(key_limit) has as many sequences in flight as it may, or because their address would "
            "leave too few for others (address_share)",
            ["reason"],
            registry=registry,
        )
        for reason in ("full", "key_limit", "address_share"):
            self._refused.labels(reason)

    @cached_property
    def for_text(self) -> Gate:
        """A gate with the same limits for requests that start no sequence. It counts requests."""
        other = copy.copy(self)
        other._counted = "requests for text alone"
        other._all, other._by_tenant, other._addresses = _Flow(), {}, AddressShares()
        return other

    @property
    def in_flight(self) -> int:
        """Sequences in flight."""
        return self._all.in_flight

    def passing(self, tenant: Tenant, has_body: bool = True, address: str = "") -> Ticket:
        """A context in which a request of one sequence is in flight. Without `has_body`, the
        request counts from `Ticket.enter` on. `address` is the client's: it counts for tenants
        without a key. Entering raises TooManyRequests if the tenant is at its limit, or the address
        would leave too few places for others; Overloaded if the router is at its limit."""
        return Ticket(self, tenant, has_body, address)

    def limit_of(self, tenant: Tenant) -> int | None:
        """The most sequences of a tenant: its key's limit, or with several keys and no such limit,
        half of `max_inflight`. None if only `max_inflight` limits the tenant."""
        if tenant.terms.inflight is not None:
            return tenant.terms.inflight
        if tenant is EVERYBODY or self._num_keys() < 2:
            return None
        return max(1, self.max_inflight // 2)

    def retry_after_s(self) -> int:
        """Seconds until there is likely to be room for a request that is refused now."""
        return self._all.retry_after_s(self._clock())

    def rate_limit(self, tenant: Tenant) -> RateLimit | None:
        """The tenant's limit and how much of it is free now; None if the tenant has no limit."""
        limit = self.limit_of(tenant)
        if limit is None:
            return None
        flow, now = self._flow(tenant), self._clock()
        remaining = max(0, limit - flow.in_flight)
        return RateLimit(limit, remaining, 0 if remaining else flow.retry_after_s(now))

    def check(self, tenant: Tenant, num: int = 1, address: str = "", own: int = 0) -> _Flow:
        """Checks that a tenant may have `num` more sequences, and returns the tenant's flow. Raises
        as `passing`. A request whose `own` sequences are the only ones in flight may take all
        places."""
        flow, limit = self._all, None
        if tenant is EVERYBODY:
            self._addresses.note(address, self._clock())
        else:
            flow, limit = self._flow(tenant), self.limit_of(tenant)
        if limit is not None and flow.in_flight + num > limit:
            retry_s = flow.refuse(self._clock(), f"key {tenant.terms.name}", self._counted)
            self._refused.labels("key_limit").inc()
            raise TooManyRequests(
                f"{flow.in_flight} {self._counted} of this key are in flight, and it may have "
                f"{limit}; try again in {retry_s} s",
                retry_s,
            )
        if self._all.in_flight + num > self.max_inflight:
            retry_s = self._all.refuse(self._clock(), "the router", self._counted)
            self._refused.labels("full").inc()
            raise Overloaded(
                f"{self._all.in_flight} {self._counted} are in flight, the most that this router "
                f"allows; try again in {retry_s} s",
                retry_s,
            )
        if flow is self._all and self._all.in_flight > own:
            self._check_address(address, num)
        return flow

    def _check_address(self, address: str, num: int) -> None:
        now, free = self._clock(), self.max_inflight - self._all.in_flight
        if self._addresses.is_too_much(address, num, free, now):
            retry_s = self._all.refuse(now, "the router", self._counted)
            self._refused.labels("address_share").inc()
            raise TooManyRequests(
                f"this address has {self._addresses.held(address)} {self._counted} in flight; "
                f"more would leave too few places for others; try again in {retry_s} s",
                retry_s,
            )

    def take(self, tenant: Tenant, num: int, address: str = "", own: int = 0) -> None:
        """Count more sequences of a tenant, or raise as `passing` does. See `check`."""
        flow = self.check(tenant, num, address, own)
        self._all.in_flight += num
        if flow is not self._all:
            flow.in_flight += num
        else:
            self._addresses.take(address, num)

    def leave(self, tenant: Tenant, num: int, address: str = "") -> None:
        """Note that `num` sequences of a tenant have ended."""
        now = self._clock()
        self._all.in_flight -= num
        self._all.ended.add(now, num)
        if tenant is EVERYBODY:
            self._addresses.give_back(address, num)
        else:
            flow = self._flow(tenant)
            flow.in_flight -= num
            flow.ended.add(now, num)

    def _flow(self, tenant: Tenant) -> _Flow:
        """The flow of a tenant with a key."""
        flow = self._by_tenant.get(tenant.share)
        if flow is None:
            flow = self._by_tenant[tenant.share] = _Flow()
        return flow


class Ticket:
    """A context in which one request is in flight. `width` is how many sequences the request
    counts for."""

    __slots__ = ("_address", "_gate", "_has_body", "_tenant", "width")

    def __init__(self, gate: Gate, tenant: Tenant, has_body: bool, address: str) -> None:
        self._gate = gate
        self._tenant = tenant
        self._address = address
        self._has_body = has_body
        self.width = 0

    def __enter__(self) -> Ticket:
        if self._has_body:
            self.enter()
        else:
            self._gate.check(self._tenant, address=self._address)
        return self

    def enter(self) -> None:
        """Count the request, if it is not counted yet. Raises as `Gate.passing`."""
        if self.width == 0:
            self._gate.take(self._tenant, 1, self._address)
            self.width = 1

    def __exit__(self, *exception: object) -> None:
        if self.width:
            self.leave()

    def hand_over(self) -> Ticket:
        """A ticket that replaces this one, for a request that continues after this context ends.
        The caller ends the new ticket with `leave`."""
        other = Ticket(self._gate, self._tenant, self._has_body, self._address)
        other.width, self.width = self.width, 0
        return other

    def leave(self) -> None:
        """Note that the sequences of the request have ended."""
        self._gate.leave(self._tenant, self.width, self._address)
        self.width = 0

    def widen(self, width: int) -> None:
        """Count the request for `width` sequences. Raises InvalidRequest if its key, or the router,
        never allows that many, otherwise as `Gate.passing`."""
        if width <= self.width:
            return
        limit = self._gate.limit_of(self._tenant)
        most = self._gate.max_inflight
        if limit is not None:
            most = min(most, limit)
        if width > most:
            raise InvalidRequest(
                f"'n': the request starts {width} sequences; {most} may be in flight", "n"
            )
        self._gate.take(self._tenant, width - self.width, self._address, self.width)
        self.width = width
