"""Hybrids served by prefill and decode apart: transformers' tokens, whatever is cached, and one or
two states on the way besides the blocks. A trained one shows what random weights would hide."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import transformers

from cli.fleet import Fleet
from tests.effort import NIGHTLY, some, times
from tests.hybrid_models import HYBRIDS
from tests.integration.fleets import (
    all_counters,
    assert_as_expected,
    complete,
    complete_all,
    counters,
    rank_settings,
    running_fleet,
    trace_of,
    wait_for,
    workers,
)
from tests.integration.random_checkpoints import SIZES, Expected, random_checkpoint
from tests.integration.reference import BLOCK, Reference, clear_references
from tests.paths import DEMO_MODEL, HYBRID

LENGTHS = (1, 17, 64, 150)
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]
"""Ranks of each layer, and stages."""
EVERYDAY = [((2, 1), (1, 2), "nixl")]
ALL = [
    each
    for each in itertools.product(LAYOUTS, LAYOUTS, ["nixl", "shm"])
    if each[:2] != ((1, 1),) * 2
]
CLASSES = {
    "qwen3.5": (transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM),
    "nemotron-h": (transformers.NemotronHConfig, transformers.NemotronHForCausalLM),
}


@pytest.fixture(scope="module", params=some(["qwen3.5", "nemotron-h"], 1))
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A random checkpoint, and the demo's tokenizer."""
    sizes = SIZES | {"num_attention_heads": 4, "num_key_value_heads": 2}
    config_class, model_class = CLASSES[request.param]
    make = partial(model_class, config_class(**HYBRIDS[request.param][1] | sizes))
    return random_checkpoint(tmp_path_factory.mktemp("model"), make)


@pytest.fixture(scope="module")
def expected(folder: Path) -> Expected:
    return Expected(folder)


def fleet_of(folder: Path, environment: Mapping[str, str] | None = None, **settings: object):
    return running_fleet(
        environment,
        model=str(folder),
        local_prefill_threshold_tokens=0,
        chunk_max_tokens=32,
        dtype="float32",
        **settings,
    )


def run(fleet: Fleet, references: list[Reference]) -> None:
    assert_as_expected(references, complete_all(fleet, references, len(references[0].output), 2))


@pytest.fixture(scope="module", params=some(["nixl", "shm"], 1))
def fleet(request: pytest.FixtureRequest, folder: Path) -> Iterator[Fleet]:
    with fleet_of(folder, prefill=2, decode=1, transport=request.param) as fleet:
        yield fleet


def test_apart_they_give_the_tokens_of_transformers(fleet: Fleet, expected: Expected) -> None:
    prompts = [expected.after((), length) for length in LENGTHS]
    before = all_counters(fleet)
    run(fleet, prompts)
    after = all_counters(fleet)
    assert after["decode-1"]["handoffs"] - before["decode-1"]["handoffs"] == len(prompts)
    blocks = sum(-(-length // BLOCK) for length in LENGTHS)
    states = sum(1 + (length > BLOCK and length % BLOCK > 0) for length in LENGTHS)
    sent = sum(after[each]["blocks_sent"] - before[each]["blocks_sent"] for each in after)
    assert sent == blocks + states


def test_a_conversation_that_moves_among_workers_stays_right(
    fleet: Fleet, expected: Expected
) -> None:
    """Blocks and states come from the worker's own cache, from a peer's, or are computed."""
    first = expected.after((), 200)
    conversation = (*first.prompt, *first.output)
    before = num_found(fleet)
    run(fleet, [first])
    for back in some((0, 1, 20), 2):
        turn = expected.after(conversation[: len(conversation) - back], 9)
        run(fleet, [turn] * 4)
    assert num_found(fleet) - before >= 100, "else every turn was computed whole"


def num_found(fleet: Fleet) -> int:
    """Tokens of prompts that no worker had to compute."""
    counted = all_counters(fleet).values()
    return sum(each["cached_tokens"] + each["fetched_tokens"] for each in counted)


@pytest.mark.parametrize("dtype", some(["float32", "bfloat16"], 1))
def test_a_trained_hybrid_served_apart_gives_the_tokens_of_transformers(dtype: str) -> None:
    """Prompts from Python's help text, and each of them again, which goes on from its state."""
    of_each = times(1, 2)
    prompts = clear_references(HYBRID, (1, 17, 100), of_each)
    with running_fleet(
        model=str(HYBRID),
        served_model_name=(DEMO_MODEL.name,),  # as all requests of these tests say
        prefill=1,
        decode=1,
        local_prefill_threshold_tokens=0,
        chunk_max_tokens=32,
        dtype=dtype,
    ) as fleet:
        run(fleet, prompts)
        run(fleet, prompts)
        assert counters(fleet, "decode-1")["handoffs"] == 2 * len(prompts)
        assert counters(fleet, "prefill-1")["cached_tokens"] == of_each * (1 + 6) * BLOCK


@pytest.mark.parametrize(("prefill", "decode", "transport"), ALL if NIGHTLY else EVERYDAY)
def test_workers_of_any_ranks_hand_states_over(
    folder: Path,
    expected: Expected,
    prefill: tuple[int, int],
    decode: tuple[int, int],
    transport: str,
) -> None:
    """Every block and state is compared by digest. What is cached gives the same tokens."""
    prompts = [expected.after((), length) for length in LENGTHS]
    ranks, environment = rank_settings(prefill, decode), {"BATON_KV_CHECKSUM": "on"}
    with fleet_of(folder, environment, prefill=1, decode=1, transport=transport, **ranks) as fleet:
        for _ in range(2):
            run(fleet, prompts)
        assert counters(fleet, "decode-1")["handoffs"] == 2 * len(prompts)
        assert counters(fleet, "prefill-1")["cached_tokens"] > 0


@pytest.mark.nightly
def test_evicted_prompts_come_back_from_tiers_with_their_states(
    folder: Path, expected: Expected, tmp_path: Path
) -> None:
    """Also from disk, after restarts, where the model is split in other ways."""
    prompts = [expected.after((number,), 150) for number in range(8)]
    environment = {
        "BATON_HOST_TIER_BYTES": str(320 << 10),  # for most of the prompts
        "BATON_DISK_TIER_DIR": str(tmp_path),
        "BATON_DISK_TIER_BYTES": str(64 << 20),
    }
    settings = {"prefill": 0, "decode": 1, "num_blocks": 60, "cluster_secret": "kept for a restart"}
    stored, loaded = "disk_tier_stored_bytes", "disk_tier_loaded_bytes"
    for counter, size, stages in ((stored, 1, 1), (loaded, 2, 1), (loaded, 1, 2)):
        ranks = {"decode_tensor_parallel": size, "decode_pipeline_parallel": stages}
        settings |= {"model": str(folder), "dtype": "float32"} | ranks
        with running_fleet(environment, **settings) as fleet:

            def has_counted(counter: str = counter, fleet: Fleet = fleet) -> bool:
                run(fleet, prompts)
                return counters(fleet, "decode-1")[counter] > 0

            wait_for("the disk", has_counted)
            run(fleet, prompts)
            assert counters(fleet, "decode-1")["loaded_tokens"] > 0
            assert counters(fleet, "decode-1")["host_tier_failures"] == 0
            assert counters(fleet, "decode-1")["disk_tier_failures"] == 0


@pytest.mark.nightly
def test_the_next_turn_after_a_drain_goes_on_from_its_state(
    folder: Path, expected: Expected
) -> None:
    first = [expected.after((number,), 150) for number in range(3)]
    with fleet_of(folder, prefill=0, decode=2) as fleet:
        run(fleet, first)
        held = {name: each["prefill_tokens"] for name, each in all_counters(fleet).items()}
        drained = max(("decode-1", "decode-2"), key=lambda name: held[name])
        (other,) = {"decode-1", "decode-2"} - {drained}
        fleet.processes[drained].signal(signal.SIGTERM)
        assert fleet.processes[drained].wait(60)
        turns = [expected.after((*each.prompt, *each.output), 9) for each in first]
        before = counters(fleet, other)["prefill_tokens"]
        run(fleet, turns)
        computed = counters(fleet, other)["prefill_tokens"] - before
        assert computed <= len(turns) * (9 + 2 * BLOCK)
        fleet.processes[drained].start()
        wait_for("it to come back", lambda: workers(fleet).get(drained, {}).get("connected"))


@pytest.mark.nightly
def test_a_running_request_moves_with_its_states_when_its_worker_drains() -> None:
    """Nothing is computed again, and the output is the one of a worker that stays."""
    prompt, length = list(range(100, 140)), 1200
    with (
        running_fleet(
            model=str(HYBRID),
            served_model_name=(DEMO_MODEL.name,),
            prefill=1,
            decode=2,
            local_prefill_threshold_tokens=0,
            dtype="float32",
        ) as fleet,
        ThreadPoolExecutor(1) as pool,
    ):
        asked = pool.submit(complete, fleet, prompt, max_tokens=length)

        def running() -> str | None:
            shown = workers(fleet)
            found = (name for name in ("decode-1", "decode-2") if shown[name]["num_running"])
            return next(found, None)

        drained = wait_for("the request to run", running)
        fleet.processes[drained].signal(signal.SIGTERM)
        answer = asked.result(timeout=120)
        attempts = trace_of(fleet, answer["id"])["attempts"]
        assert len({each["decode"]["worker_id"] for each in attempts}) == 2
        computed = sum(each["prefill_tokens"] for each in all_counters(fleet).values())
        assert computed == len(prompt)
        again = complete(fleet, prompt, max_tokens=length)
        assert again["choices"][0]["token_ids"] == answer["choices"][0]["token_ids"]
        fleet.processes[drained].start()
        wait_for("it to come back", lambda: workers(fleet).get(drained, {}).get("connected"))
