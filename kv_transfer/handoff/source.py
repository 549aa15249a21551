"""The source side of handoffs and fetches: which blocks to write, when, and when to release them.

The source of a handoff holds blocks of a prompt that its sink lacks: a prefill worker that computes
the prompt, or a decode worker that hands a request over. Pure: each event returns the actions that
the owner must carry out; time is passed in, in seconds of any one clock.

A sink asks for a handoff. Once the owner holds every block of the prompt (`begin`), `SendBegun`
answers the ask, and the sink may grant. Blocks are posted in prompt order, each at most once, only
under a live grant with a margin left. After expiry, abort, failure or completion no more writes are
posted. When no write is outstanding the handoff closes, exactly once: `Close` answers the sink,
which may then reuse its blocks; `Release` unpins ours. Messages for a closed or unknown handoff are
counted and answered with Close again, so that no sink waits for a lost answer.

A fetch arrives with its grant, and is served at once from the blocks that the owner has then: it
takes no memory and waits for nothing but its own writes. A key is served once at most.
"""

from __future__ import annotations

from collections.abc import Sequence

from kv_transfer.handoff.actions import Close, Lookup, Release, SendBegun, SourceAction
from kv_transfer.handoff.key import ClosedHandoffs, HandoffKey, IllegalMove, key_of
from kv_transfer.handoff.outgoing import GroupedBlocks, Outgoing, OutgoingGroup, is_whole
from kv_transfer.handoff.posted_writes import PostedWrites
from kv_transfer.handoff.states import SourceEvent, SourceState, source_transition
from protocol.handoff_messages import FetchShortfall, KvAsk, KvFetch, KvGrant, KvRenew

_REMEMBERED = 8192


class HandoffSource:
    """All handoffs that this worker sends. `ignored` counts events of unknown handoffs."""

    def __init__(
        self,
        margin_s: float,
        max_write_blocks: int = 256,
        unasked_s: float = float("inf"),
        max_fetch_blocks: int = 64,
        windows: Sequence[int | None] = (None,),
    ) -> None:
        """Writes are posted only while a grant has `margin_s` left, with at most `max_write_blocks`
        each; writes of fetches with at most `max_fetch_blocks`. `windows` has the window of each
        group of the layout. In a group with a window, the first blocks of a prompt need not be
        ready.

        A prompt that has begun, but that no sink asks for within `unasked_s`, is closed.
        """
        self.ignored = 0
        self._margin_s = margin_s
        self._unasked_s = unasked_s
        self._max_write_blocks = max_write_blocks
        self._max_fetch_blocks = max_fetch_blocks
        self._windows = windows
        self._handoffs: dict[HandoffKey, Outgoing] = {}
        self._writes = PostedWrites()
        self._closed = ClosedHandoffs(_REMEMBERED)

    @property
    def num_open(self) -> int:
        """Handoffs that have not closed."""
        return len(self._handoffs)

    @property
    def num_outstanding(self) -> int:
        """Number of writes that were posted and have not finished."""
        return len(self._writes)

    def is_open(self, key: HandoffKey) -> bool:
        """Whether the handoff has not closed (it may be draining)."""
        return key in self._handoffs

    def error_of(self, key: HandoffKey) -> str:
        """Why a closed handoff failed; "" if it succeeded or is not remembered."""
        return self._closed.error_of(key) or ""

    @property
    def waits_for_grant(self) -> bool:
        """Whether a begun handoff waits for the grant of a sink that is still asking."""
        return any(
            each.state is SourceState.ASKED and each.has_begun for each in self._handoffs.values()
        )

    @property
    def keys(self) -> list[HandoffKey]:
        """Handoffs that have not closed."""
        return list(self._handoffs)

    def state_of(self, key: HandoffKey) -> str:
        """The state of a handoff, for people."""
        handoff = self._handoffs.get(key)
        return SourceState.CLOSED.value if handoff is None else handoff.state.value

    def agent_of(self, key: HandoffKey) -> str | None:
        """The agent of the sink that asked for an open handoff; None before its ask."""
        handoff = self._handoffs.get(key)
        return None if handoff is None else handoff.agent

    # -- calls by the owner -------------------------------------------------------------------

    def open(
        self,
        key: HandoffKey,
        num_blocks: int,
        now: float,
        grant_deadline: float,
        prompt: bytes = b"",
    ) -> list[SourceAction]:
        """Expect a prompt of `num_blocks` blocks; its grant must arrive before `grant_deadline`.
        `prompt` is the digest of its tokens: a sink that asks for another one gets nothing.
        Source blocks that are reported as ready stay pinned until Release."""
        handoff = self._handoffs.get(key)
        if handoff is None and self._closed.error_of(key) is not None:
            self.ignored += 1
            return [Release(key)]
        if handoff is None:
            handoff = self._handoffs[key] = self._new(SourceState.WAITING)
        elif handoff.num_blocks is None:
            handoff.state = source_transition(handoff.state, SourceEvent.OPEN)
        else:
            raise IllegalMove(f"handoff {key} is opened twice")
        handoff.num_blocks = num_blocks
        handoff.deadline = grant_deadline
        handoff.prompt = prompt
        return self._refuse_another(key, handoff)

    def begin(self, key: HandoffKey, now: float) -> list[SourceAction]:
        """The owner holds blocks for the whole prompt and keeps them until Release."""
        handoff = self._handoffs.get(key)
        if handoff is None:
            self.ignored += 1
            return []
        if handoff.num_blocks is None:
            raise IllegalMove(f"handoff {key} begins before it is open")
        handoff.has_begun = True
        handoff.ask_by = now + self._unasked_s
        return self._answer_ask(key, handoff)

    def blocks_ready(
        self,
        key: HandoffKey,
        first_block: int,
        block_ids: Sequence[int],
        chunk: int,
        now: float,
        group: int = 0,
    ) -> list[SourceAction]:
        """Prompt blocks from `first_block` on are computed and lie in these blocks of our pool.

        The caller reports every block of a group once, in prompt order, whether or not it will be
        sent; for a group with a window, the blocks that it still keeps when the prompt is computed.
        """
        handoff = self._handoffs.get(key)
        if handoff is None:
            self.ignored += 1
            return []
        ready = handoff.groups[group]
        if self._windows[group] is not None and not ready.source_blocks:
            ready.source_first = first_block
        num_ready = ready.source_end
        if first_block != num_ready or num_ready + len(block_ids) > (handoff.num_blocks or 0):
            raise ValueError(
                f"blocks {first_block}+{len(block_ids)} of {key} follow {num_ready} "
                f"of {handoff.num_blocks}"
            )
        ready.add(block_ids, chunk)
        return self._advance(key, handoff, now)

    def finish(
        self, key: HandoffKey, now: float, grant_deadline: float = float("inf")
    ) -> list[SourceAction]:
        """The last block is ready: close as soon as all granted blocks are written.

        The grant must arrive before this `grant_deadline` and before that of `open`.
        """
        handoff = self._handoffs.get(key)
        if handoff is None:
            self.ignored += 1
            return []
        if missing := handoff.not_ready(key):
            raise ValueError(missing)
        handoff.is_finished = True
        handoff.deadline = min(handoff.deadline, grant_deadline)
        return self._advance(key, handoff, now)

    def write_finished(self, write_id: int, error: str | None) -> list[SourceAction]:
        """The transport reports the end of a PostWrite."""
        key = self._writes.pop(write_id)
        if key is None:
            self.ignored += 1
            return []
        handoff = self._handoffs[key]
        handoff.outstanding.remove(write_id)
        if error is not None:
            return self._fail(key, handoff, error)
        return self._settle(key, handoff)

    def abort(
        self, key: HandoffKey, error: str = "", agent: str | None = None
    ) -> list[SourceAction]:
        """Stop, because the router or sink asked (`error` is empty) or for a reason of this
        worker's own. If the sink asked, `agent` is its agent, and it is always answered."""
        handoff = self._handoffs.get(key)
        if handoff is None:
            self._closed.remember_new(key, error)
            return self._answer_again(key, agent)
        if handoff.state is SourceState.DRAINING:
            return []
        handoff.agent = handoff.agent or agent
        return self._stop(key, handoff, error)

    def sweep(self, now: float) -> list[SourceAction]:
        """Stop handoffs whose ask or grant has expired, or that waited too long for an ask, a grant
        or the prompt."""
        actions: list[SourceAction] = []
        for key, handoff in list(self._handoffs.items()):
            if late_for := handoff.late_for(now):
                actions += self._stop(key, handoff, late_for)
        return actions

    # -- messages of sinks --------------------------------------------------------------------

    def ask(self, ask: KvAsk, now: float) -> list[SourceAction]:
        """A sink asks for this handoff. An ask may precede `open` by at most its time to live,
        renewed or not, so that the sink does not wait for a prompt that never comes."""
        key = key_of(ask)
        handoff = self._handoffs.get(key)
        if handoff is None and any(other.supersedes(key) for other in self._handoffs):
            self._closed.remember(key, "a newer attempt is open")
        if handoff is None and self._closed.error_of(key) is not None:
            return self._answer_again(key, ask.agent)
        expires = now + ask.ttl_ms / 1000
        if handoff is None:
            handoff = self._handoffs[key] = self._new(SourceState.ASKED_EARLY)
            handoff.deadline = expires
        elif handoff.state is SourceState.WAITING:
            handoff.state = source_transition(handoff.state, SourceEvent.ASK)
        elif handoff.state not in _ASKED:
            self.ignored += 1
            return []
        handoff.agent = ask.agent
        handoff.expires = expires
        handoff.asked_prompt = ask.prompt
        return self._refuse_another(key, handoff) or self._answer_ask(key, handoff)

    def grant(self, grant: KvGrant, now: float) -> list[SourceAction]:
        """The sink grants its blocks, in answer to KvBegun."""
        key = key_of(grant)
        handoff = self._handoffs.get(key)
        if handoff is None:
            return self._answer_unknown(key, grant.agent)
        if handoff.state in (SourceState.SENDING, SourceState.DRAINING):
            self.ignored += 1
            return []
        handoff.agent = grant.agent
        if handoff.state is not SourceState.ASKED or not handoff.has_begun:
            return self._stop(key, handoff, "blocks were granted before the prompt had begun")
        handoff.state = source_transition(handoff.state, SourceEvent.GRANT)
        if fault := handoff.take_grant(grant, now):
            return self._stop(key, handoff, fault)
        return self._advance(key, handoff, now)

    def fetch(self, fetch: KvFetch, now: float) -> list[SourceAction]:
        """A sink wants blocks of our cache and grants its own for them. Lookup asks the owner which
        blocks it has, and `found` must follow. A repeated fetch is not served again."""
        key = key_of(fetch)
        if key in self._handoffs:
            self.ignored += 1
            return []
        if self._closed.error_of(key) is not None:
            return self._answer_again(key, fetch.agent)
        if not is_whole(fetch, len(self._windows)):
            self._closed.remember(key, "the fetch is malformed")
            return self._answer_again(key, fetch.agent)
        return [Lookup(fetch)]

    def found(
        self, fetch: KvFetch, blocks: GroupedBlocks, why: FetchShortfall | None, now: float
    ) -> list[SourceAction]:
        """Take the answer to Lookup. The blocks of our pool, pinned until Release, are those of the
        leading hashes, and those of other groups for the slots. `why` says why some are missing."""
        key = key_of(fetch)
        if not any(blocks):
            self._closed.remember(key, "")
            return [Close(key, fetch.agent, "", why=why)]
        handoff = self._handoffs[key] = Outgoing.of_fetch(fetch, blocks, why, now)
        return self._advance(key, handoff, now)

    def renew(self, renew: KvRenew, agent: str, now: float) -> list[SourceAction]:
        """Sink `agent` extends its grant."""
        key = key_of(renew)
        handoff = self._handoffs.get(key)
        if handoff is None:
            return self._answer_unknown(key, agent)
        if handoff.state is SourceState.SENDING:
            handoff.expires = now + renew.ttl_ms / 1000
            return self._advance(key, handoff, now)
        if handoff.state is SourceState.DRAINING:
            return []
        handoff.agent = agent
        return self._stop(key, handoff, "the grant was lost on its way")

    def pool_lost(self, agent: str, successor: str = "") -> list[SourceAction]:
        """Note that a write to the pool of a living sink failed. Handoffs with a grant fail.
        Handoffs that were only asked for continue, and their grants restore the connection to the
        pool. With `successor`, the sink is to be reached under this name from now on."""
        actions = self._lose(agent, (SourceState.SENDING, SourceState.DRAINING))
        for handoff in self._handoffs.values() if successor else ():
            if handoff.agent == agent and handoff.state in _ASKED:
                handoff.agent = successor
        return actions

    def peer_lost(self, agent: str) -> list[SourceAction]:
        """Note that the sink is gone: all its handoffs fail."""
        return self._lose(agent, tuple(SourceState))

    # -- steps ---------------------------------------------------------------------------

    def _new(self, state: SourceState) -> Outgoing:
        return Outgoing(state, [OutgoingGroup() for _ in self._windows])

    def _lose(self, agent: str, states: Sequence[SourceState]) -> list[SourceAction]:
        actions: list[SourceAction] = []
        for key, handoff in list(self._handoffs.items()):
            if handoff.agent == agent and handoff.state in states:
                actions += self._fail(key, handoff, "the sink cannot be reached")
        return actions

    def _refuse_another(self, key: HandoffKey, handoff: Outgoing) -> list[SourceAction]:
        """Stop a handoff whose sink expects another prompt, because two requests have the same
        name."""
        if not handoff.is_asked_for_another:
            return []
        return self._stop(key, handoff, "the sink asked for another prompt under this name")

    def _answer_ask(self, key: HandoffKey, handoff: Outgoing) -> list[SourceAction]:
        """Answer an ask, once the prompt has begun."""
        if handoff.state is not SourceState.ASKED or not handoff.has_begun:
            return []
        assert handoff.agent is not None, "it was asked for"
        return [SendBegun(key, handoff.agent)]

    def _advance(self, key: HandoffKey, handoff: Outgoing, now: float) -> list[SourceAction]:
        """Post the blocks that are ready and granted; stop when no more can follow."""
        if handoff.state is not SourceState.SENDING:
            return []
        if missing := handoff.missing():
            return self._stop(key, handoff, missing)
        actions: list[SourceAction] = []
        if handoff.expires - now >= self._margin_s:
            most = self._max_fetch_blocks if key.part else self._max_write_blocks
            for group, blocks in enumerate(handoff.groups):
                while piece := blocks.take(group, most):
                    before = handoff.expires - self._margin_s
                    actions.append(self._writes.post(key, handoff, piece, before))
        if handoff.is_finished and handoff.is_posted:
            actions += self._stop(key, handoff, "")
        return actions

    def _fail(self, key: HandoffKey, handoff: Outgoing, error: str) -> list[SourceAction]:
        if handoff.state is not SourceState.DRAINING:
            return self._stop(key, handoff, error)
        handoff.error = handoff.error or error
        return self._settle(key, handoff)

    def _stop(self, key: HandoffKey, handoff: Outgoing, error: str) -> list[SourceAction]:
        handoff.state = source_transition(handoff.state, SourceEvent.STOP)
        handoff.error = error
        return self._settle(key, handoff)

    def _settle(self, key: HandoffKey, handoff: Outgoing) -> list[SourceAction]:
        """Close a stopped handoff once no write is outstanding."""
        if handoff.state is not SourceState.DRAINING or handoff.outstanding:
            return []
        handoff.state = source_transition(handoff.state, SourceEvent.DRAINED)
        del self._handoffs[key]
        num_blocks = handoff.num_posted if key.part else 0
        self._closed.remember(key, handoff.error, num_blocks)
        actions: list[SourceAction] = []
        if handoff.agent is not None:
            actions.append(Close(key, handoff.agent, handoff.error, num_blocks, handoff.why))
        if handoff.num_blocks is not None:
            actions.append(Release(key))
        return actions

    def _answer_unknown(self, key: HandoffKey, agent: str) -> list[SourceAction]:
        # an unknown fetch was never served, and never will be
        self._closed.remember_new(key, "" if key.part else "the handoff is not known")
        return self._answer_again(key, agent)

    def _answer_again(self, key: HandoffKey, agent: str | None) -> list[SourceAction]:
        self.ignored += 1
        error = self._closed.error_of(key)
        if agent is None or error is None:
            return []
        return [Close(key, agent, error, self._closed.blocks_of(key))]


_ASKED = (SourceState.ASKED_EARLY, SourceState.ASKED)
