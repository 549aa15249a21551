"""Declared prefixes are all that two salts have in common in a cache, whatever their prompts.

Real are the router's hashes, the worker's, and the pool that they meet in.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.engine import EngineLimits
from engine.sampling.grammar import Grammars
from gateway.admission.shared_prefixes import SharedPrefixes
from http_kit.tenant import EVERYBODY, KeyTerms, tenant_of
from protocol.hashing import ChainStart, chain_start, more_hashes
from protocol.messages import Generate
from router.requests.hash_thread import hash_in_thread
from router.requests.prompt_hashes import PromptHashes
from scheduling.block_manager import BlockManager
from scheduling.sequence import Sequence
from tests.layouts import bare_layout
from tests.paths import DEMO_MODEL
from tests.sequences import greedy
from worker.intake import Intake

SEED, BLOCK = "seed", 2
LAYOUT = bare_layout(BLOCK)
GRAMMARS = Grammars(DEMO_MODEL / "tokenizer.json", 3, ())
INTAKE = Intake(EngineLimits(3, 4096), LAYOUT, GRAMMARS, SEED, 9)
TOKENS = st.lists(st.integers(0, 1), max_size=14)  # so few that prompts have much in common
PROMPT = TOKENS.filter(bool)
SALTS = [
    EVERYBODY.salt_with(""),
    EVERYBODY.salt_with("own"),
    *(tenant_of(each, KeyTerms(each), b"secret").salt_with("") for each in "ab"),
    tenant_of("a", KeyTerms("a", cache="group"), b"secret").salt_with(""),
    tenant_of("a", KeyTerms("a"), b"secret").salt_with("own"),
]


@dataclass(frozen=True)
class Asked:
    """A prompt as it reaches a worker, and its output there."""

    prompt: list[int]
    output: list[int]
    salt: str
    num_shared: int

    @property
    def start(self) -> ChainStart:
        return chain_start(LAYOUT.model_fingerprint, self.salt, SEED, self.num_shared, BLOCK)

    def sequence(self, num_output: int = 0) -> Sequence:
        """The worker's sequence, of whose output earlier attempts made some."""
        message = Generate(
            request_id="r",
            attempt=0,
            token_ids=self.prompt + self.output[:num_output],
            num_output=num_output,
            sampling=greedy(64),
            deadline_ms=1,
            cache_salt=self.salt,
            shared_tokens=self.num_shared,
        )
        made = INTAKE.sequence(message, now=0.0)
        for token in self.output[num_output:]:
            made.append(token)
        return made


def num_common(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def declared_tokens(prompt: list[int], prefixes: list[list[int]]) -> int:
    return max((num_common(prompt, each) for each in prefixes), default=0)


@given(PROMPT, st.lists(TOKENS, max_size=8))
def test_the_longest_common_beginning_with_any_prefix_is_shared(
    prompt: list[int], prefixes: list[list[int]]
) -> None:
    assert SharedPrefixes(prefixes).num_shared(prompt) == declared_tokens(prompt, prefixes)


@st.composite
def akin(draw: st.DrawFn, num: int) -> list[list[int]]:
    """Token ids that begin alike and then differ."""
    base = draw(st.lists(st.integers(0, 1), min_size=16, max_size=16))
    return [base[: draw(st.integers(1, 16))] + draw(TOKENS) for _ in range(num)]


@given(akin(4), st.integers(0, 2), st.tuples(TOKENS, TOKENS), st.permutations(SALTS))
def test_two_salts_share_the_declared_blocks_and_no_other(
    texts: list[list[int]],
    num_prefixes: int,
    outputs: tuple[list[int], list[int]],
    salts: list[str],
) -> None:
    prefixes, prompts = texts[:num_prefixes], texts[2:]
    one, other = _asked_of(prefixes, prompts, outputs, salts)
    public = min(declared_tokens(each, prefixes) // BLOCK for each in prompts)
    common = num_common(one.prompt + one.output, other.prompt + other.output) // BLOCK
    hashes, others = one.sequence().hashes, other.sequence().hashes
    assert _found_by(others, hashes) == min(public, common)
    assert len(set(hashes) & set(others)) == min(public, common), "nothing further behind"


@given(akin(4), st.integers(0, 2), st.sampled_from(SALTS))
def test_one_salt_shares_all_of_its_prompts(
    texts: list[list[int]], num_prefixes: int, salt: str
) -> None:
    prefixes, prompts = texts[:num_prefixes], texts[2:]
    one, other = _asked_of(prefixes, prompts, ([], []), [salt, salt])
    common = num_common(*prompts) // BLOCK
    assert _found_by(other.sequence().hashes, one.sequence().hashes) == common


def _asked_of(
    prefixes: list[list[int]],
    prompts: list[list[int]],
    outputs: tuple[list[int], list[int]],
    salts: list[str],
) -> list[Asked]:
    declared = SharedPrefixes(prefixes)
    each_of = zip(prompts, outputs, salts, strict=False)
    return [Asked(*each, declared.num_shared(each[0])) for each in each_of]


def _found_by(hashes: list[bytes], computed: list[bytes]) -> int:
    """How many leading blocks a sequence finds in a pool with another's blocks."""
    blocks = BlockManager(max(1, len(computed)))
    for block, digest in zip(blocks.allocate(len(computed)), computed, strict=True):
        blocks.publish(block, digest)
    return len(blocks.match(hashes))


@given(akin(2), TOKENS, st.sampled_from(SALTS), st.data())
def test_routers_and_workers_agree(
    texts: list[list[int]], output: list[int], salt: str, data: st.DataObject
) -> None:
    """Of a prompt, and of later attempts at it."""
    prefix, prompt = texts
    asked = Asked(prompt, output, salt, SharedPrefixes([prefix]).num_shared(prompt))
    at_worker = asked.sequence().hashes
    assert asked.sequence(data.draw(st.integers(0, len(output)))).hashes == at_worker
    of_prompt = PromptHashes().of(prompt, asked.start, BLOCK)
    assert of_prompt == at_worker[: len(prompt) // BLOCK]
    assert more_hashes(of_prompt, asked.start, prompt + output, BLOCK) == at_worker


@given(akin(4))
def test_a_long_prompts_hashes_are_the_same(texts: list[list[int]]) -> None:
    async def check() -> None:
        prefix, *prompts = texts
        for prompt in prompts:
            asked = Asked(prompt, [], "salt", SharedPrefixes([prefix]).num_shared(prompt))
            long = PromptHashes()
            await hash_in_thread(long, prompt, asked.start, BLOCK)
            assert long.of(prompt, asked.start, BLOCK) == asked.sequence().hashes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("router.requests.hash_thread.HASHED_AT_ONCE", 2 * BLOCK)
        asyncio.run(check())


def test_a_prompt_of_declared_blocks_alone_is_everybodys() -> None:
    prompt = [0, 1, 1, 0]
    hashes = {tuple(Asked(prompt, [], salt, len(prompt)).sequence().hashes) for salt in SALTS}
    assert len(hashes) == 1
    behind = {Asked(prompt, [1, 1], salt, len(prompt)).sequence().hashes[-1] for salt in SALTS}
    assert len(behind) == len(SALTS), "what a key generates behind it is its own"


def test_fleets_share_no_declared_prefix() -> None:
    starts = [
        chain_start(model, "salt", seed, BLOCK, BLOCK)
        for model, seed in (("m", "s"), ("n", "s"), ("m", "t"))
    ]
    assert len({more_hashes([], each, [0, 1], BLOCK)[0] for each in starts}) == 3
