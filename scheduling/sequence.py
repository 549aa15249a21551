"""One sequence of tokens on one worker: its tokens, its blocks, its place in the schedule.

Pure data with a state machine; torch-free. Only the scheduler changes a sequence's state and
blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from protocol.hashing import next_hash
from protocol.messages import FinishReason
from protocol.retention import RetentionHint
from protocol.sampling import PromptLogprobs, SamplingParams
from scheduling.prompt_record import PromptRecord
from scheduling.states.step import StateStep

Key = tuple[str, int]


class OutputGrammar(Protocol):
    """A grammar that follows the output of one sequence."""

    @property
    def is_ready(self) -> bool:
        """Whether the grammar is compiled."""

    @property
    def awaits_mask(self) -> bool:
        """Whether the allowed next tokens are unknown and will not be known in time for a step that
        is planned now."""

    def advance(self, token_id: int) -> bool:
        """Consume a chosen token; True if the grammar is complete and allows no further token."""

    def close(self) -> None:
        """Release the grammar: the sequence has ended."""


class SequenceState(StrEnum):
    """The state of a sequence.

    WAITING -> RECEIVING (blocks come from a peer) -> RUNNING
    WAITING -> PREFILLING (computed here) -> RUNNING
    WAITING -> FETCHING (leading blocks come from a peer's cache or a tier) -> PREFILLING
    FETCHING -> WAITING (the peer does not answer)
    PREFILLING | RUNNING -> WAITING (preempted)
    any -> FINISHED
    """

    WAITING = "waiting"
    RECEIVING = "receiving"
    FETCHING = "fetching"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


_MOVES: dict[SequenceState, frozenset[SequenceState]] = {
    SequenceState.WAITING: frozenset(
        {
            SequenceState.RECEIVING,
            SequenceState.FETCHING,
            SequenceState.PREFILLING,
            SequenceState.FINISHED,
        }
    ),
    SequenceState.FETCHING: frozenset(
        {SequenceState.PREFILLING, SequenceState.WAITING, SequenceState.FINISHED}
    ),
    SequenceState.RECEIVING: frozenset({SequenceState.RUNNING, SequenceState.FINISHED}),
    SequenceState.PREFILLING: frozenset(
        {SequenceState.RUNNING, SequenceState.WAITING, SequenceState.FINISHED}
    ),
    SequenceState.RUNNING: frozenset({SequenceState.WAITING, SequenceState.FINISHED}),
    SequenceState.FINISHED: frozenset(),
}


@dataclass(slots=True)
class BlockTable:
    """The blocks of a sequence in one group of layers: block `first + i` of the sequence is pool
    block `blocks[i]`. Earlier ones have left the group's window. Behind the blocks of the
    sequence's tokens there may be blocks for later ones."""

    blocks: list[int] = field(default_factory=list)
    first: int = 0

    @property
    def end(self) -> int:
        """The number of leading blocks of the sequence up to the last one in the table."""
        return self.first + len(self.blocks)


@dataclass(eq=False, slots=True)
class Sequence:
    """One sequence; identified by `(request_id, attempt)`.

    - `tokens`: the prompt followed by the output. The first `num_prompt` tokens are the caller's
      prompt; output of earlier attempts follows them.
    - `tables`: its blocks, for each group of layers.
    - `num_computed`: number of tokens whose KV is in its blocks. Steps under way, whose outcome
      is unknown, compute `num_ahead` more; `num_steps` steps under way use its blocks.
      `unlanded` are the positions where these steps begin, oldest first, if there are windows.
    - `remote`: the blocks and the first token come from a peer, which holds all these blocks once
      `source_has_begun`.
    - `prefill_only`: the sequence ends on this worker with its first token, and the worker `target`
      continues it.
    - `holders`: the owner's notes about workers and tiers that may hold leading blocks of the
      prompt; None if there are none. Of the tokens that are computed, `num_cached` were cached here
      at the admission, and `num_fetched` came from a peer's cache or a tier. `num_expected` more
      blocks are being fetched.
    - `is_hinted`: at least one of `holders` probably does hold some.
    - `stays_in_pool`: its blocks must not be kept in the worker's tiers.
    - `retention`: how long, and with which priority, its blocks should stay in the pool when it has
      finished; None if the request does not say.
    - `grammar`: follows the output if `sampling` has a grammar. While the sequence `is_held`, steps
      leave it out, because its grammar awaits a mask.
    - `last_token_at`: the time of the last token, or of the last step that left the sequence out.
    - `num_passed_pages`: pages of sequences that were admitted past this one while it waits.
    - `history`: the sampler's token counts, if the sampler needs any.
    - `share`: sequences of one share belong to one owner; the shares get equal turns.
    - `session`: the conversation or agent that the sequence is a turn of, "" if it is not known.
    - `hashes`: the hashes of its full blocks. The first `num_shared` are given and the same for
      every tenant; `root_hash` is the parent of the next one.
    - `state_step`: what the planned step does to its states, if layers keep some. At its admission,
      the layers that keep all tokens had the prompt's first `fork_block` blocks cached.
    - `prompt_record`: collects the prompt's log-probabilities, if the request wants them.
    - `trace_id`: the trace that the request is part of, "" if there is none.
    """

    request_id: str
    attempt: int
    tokens: list[int]
    num_prompt: int
    sampling: SamplingParams
    root_hash: bytes
    block_size: int
    arrival: float
    deadline: float
    priority: int = 0
    share: str = ""
    session: str = ""
    remote: bool = False
    prefill_only: bool = False
    trace_id: str = ""
    source_has_begun: bool = False
    target: str = ""
    holders: Any = None
    is_hinted: bool = False
    stays_in_pool: bool = False
    retention: RetentionHint | None = None
    grammar: OutputGrammar | None = None
    is_held: bool = False
    history: Any = None
    prompt_record: PromptRecord | None = None
    state: SequenceState = SequenceState.WAITING
    num_computed: int = 0
    num_ahead: int = 0
    num_steps: int = 0
    num_cached: int = 0
    num_fetched: int = 0
    num_expected: int = 0
    num_preemptions: int = 0
    num_passed_pages: int = 0
    last_token_at: float = 0.0
    tables: list[BlockTable] = field(default_factory=lambda: [BlockTable()])
    unlanded: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    num_shared: int = 0
    num_published: int = 0
    state_step: StateStep | None = None
    fork_block: int = 0
    order: int = 0

    def __post_init__(self) -> None:
        self.extend_hashes()

    @property
    def key(self) -> Key:
        """`(request_id, attempt)`."""
        return (self.request_id, self.attempt)

    @property
    def block_table(self) -> list[int]:
        """The blocks of the first group, which are those of all layers if there is one group."""
        return self.tables[0].blocks

    @block_table.setter
    def block_table(self, blocks: list[int]) -> None:
        self.tables[0].blocks = blocks

    @property
    def most_tokens(self) -> int:
        """The most tokens that the sequence may have on this worker."""
        if self.prefill_only:
            return len(self.tokens)
        return self.num_prompt + self.sampling.max_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and the output so far."""
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        """Number of output tokens so far, over all attempts; the index of the next one."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_remaining(self) -> int:
        """Tokens whose KV is still to be computed."""
        return len(self.tokens) - self.num_computed

    @property
    def num_launched(self) -> int:
        """Tokens whose KV is computed or is being computed by steps under way."""
        return self.num_computed + self.num_ahead

    @property
    def next_index(self) -> int:
        """Output index of the token that the next step chooses. Counts a token that the step under
        way is choosing."""
        promised = self.num_ahead if self.state is SequenceState.RUNNING else 0
        return self.num_output + promised

    @property
    def follows_tokens(self) -> bool:
        """Whether sampling needs the earlier tokens, besides the logits."""
        params = self.sampling
        return self.grammar is not None or params.penalizes or bool(params.bad_words)

    @property
    def takes_likeliest(self) -> bool:
        """Whether the next token is simply the one with the largest logit: no log-probabilities,
        masks or penalties."""
        params = self.sampling
        return self.grammar is None and params.is_plain and self.next_index >= params.min_tokens

    @property
    def is_ready(self) -> bool:
        """Whether the sequence can be computed: its grammar, if any, is compiled and does not await
        a mask."""
        return self.grammar is None or (self.grammar.is_ready and not self.grammar.awaits_mask)

    @property
    def awaits_mask(self) -> bool:
        """Whether a step planned now should leave the sequence out; see `OutputGrammar`."""
        return self.grammar is not None and self.grammar.awaits_mask

    @property
    def needs_prompt_logits(self) -> bool:
        """Whether the prompt's own log-probabilities are still to be computed. They need the
        logits of all its positions, so cached blocks cannot be used."""
        return self.sampling.prompt_logprobs is not None and self.num_output == 0

    def take_prompt_logprobs(self) -> PromptLogprobs | None:
        """Take the prompt's log-probabilities out of the sequence, once it has its first token.
        None if there are none."""
        record, self.prompt_record = self.prompt_record, None
        return None if record is None else record.whole()

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def transition(self, state: SequenceState) -> None:
        """Move to `state`; an illegal move is a bug."""
        assert state in _MOVES[self.state], f"{self.key}: {self.state} -> {state}"
        self.state = state
        if state is SequenceState.FINISHED and self.grammar is not None:
            self.grammar.close()

    def digest(self, num_tokens: int) -> bytes:
        """Identifies the first `num_tokens` tokens and all else that their KV depends on."""
        num_full = num_tokens // self.block_size
        parent = self.hashes[num_full - 1] if num_full else self.root_hash
        return next_hash(parent, self.tokens[num_full * self.block_size : num_tokens])

    def extend_hashes(self) -> None:
        """Hash the blocks that have become full since the last call."""
        size = self.block_size
        while (len(self.hashes) + 1) * size <= len(self.tokens):
            start = len(self.hashes) * size
            is_first = len(self.hashes) == self.num_shared
            parent = self.root_hash if is_first else self.hashes[-1]
            self.hashes.append(next_hash(parent, self.tokens[start : start + size]))

    def append(self, token_id: int) -> FinishReason | None:
        """Add one output token. Returns the finish reason if the sequence ends with it, or None."""
        self.tokens.append(token_id)
        self.extend_hashes()
        if self.grammar is not None and self.grammar.advance(token_id):
            return FinishReason.STOP
        if token_id in self.sampling.stop_token_ids and self.num_output > self.sampling.min_tokens:
            return FinishReason.STOP
        if self.num_output >= self.sampling.max_tokens:
            return FinishReason.LENGTH
        return None
