"""Settings of workers: what is required, what contradicts itself, and names."""

from __future__ import annotations

import re

import pytest

from process.settings import load_settings
from protocol.errors import ConfigError
from worker.assembly import _share_card
from worker.settings import WorkerSettings, choose_worker_id

SECRETS = {
    "BATON_REDIS_URL": "redis://:pass@localhost:1",
    "BATON_CLUSTER_SECRET": "a secret of sixteen or more",
}


def load(*argv: str, environ: dict[str, str] = SECRETS) -> WorkerSettings:
    return load_settings(
        WorkerSettings,
        ["--model=m", *argv],
        prog="p",
        description="d",
        section="decode",
        environ=environ,
    )


def test_defaults_need_a_model_a_redis_and_a_secret() -> None:
    settings = load()
    assert (settings.block_size, settings.itl_target_ms, settings.transport) == (16, 50.0, "auto")
    for name in SECRETS:
        left = {key: value for key, value in SECRETS.items() if key != name}
        with pytest.raises(ConfigError, match=name):
            load(environ=left)


def test_a_share_of_a_card_is_refused_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match="part of a CUDA card"):
        _share_card(load("--sm-fraction=0.5", "--device=cpu"))
    _share_card(load("--device=cpu"))


def test_secrets_are_in_no_repr() -> None:
    assert "pass" not in repr(load())
    assert "sixteen" not in repr(load())


@pytest.mark.parametrize(
    "flag",
    [
        "--dtype=int8",
        "--device=tpu",
        "--device=cuda:x",
        "--block-size=0",
        "--memory-fraction=1.5",
        "--worker-id=a b",
        "--worker-id=../x",
        "--redis-url=http://localhost",
        "--transport=smoke",
        "--control-port=65536",
        "--lease-s=0",
    ],
)
def test_values_out_of_range_are_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match=flag.partition("=")[0]):
        load(flag)


def test_chunk_bounds_must_not_cross() -> None:
    with pytest.raises(ConfigError, match=r"chunk_min_tokens \(600\)"):
        load("--chunk-min-tokens=600", "--chunk-max-tokens=512")


def test_worker_ids() -> None:
    assert choose_worker_id("decode", "mine") == "mine"
    chosen = {choose_worker_id("decode", None) for _ in range(50)}
    assert len(chosen) > 1
    assert all(re.fullmatch(r"decode-[0-9a-f]{6}", each) for each in chosen)


@pytest.mark.parametrize(
    "flags",
    [
        ["--weights-from=peer"],
        ["--batch-invariant=true"],
    ],
)
def test_what_several_ranks_do_not_have_is_refused_by_name(flags: list[str]) -> None:
    load(*flags)
    name = flags[0].removeprefix("--").partition("=")[0].replace("-", "_")
    with pytest.raises(ConfigError, match=f"^{name}.*tensor_parallel"):
        load("--tensor-parallel=2", *flags)


def test_stages_change_no_bits() -> None:
    assert load("--pipeline-parallel=2", "--batch-invariant=true").num_ranks == 2
