"""Real processes end with one line and status 2 where a checkpoint would crash or stall them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from process.store.embedded_valkey import EmbeddedValkey
from tests.integration.refusals import WORKER, refusal_of
from tests.paths import DEMO_MODEL

ENDLESS_LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
TEN_NORMALIZERS = [
    {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10} for _ in range(10)
]


def change(folder: Path, name: str, **fields: Any) -> None:
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def abort(folder: Path) -> None:
    """The tokenizer's library ends its process: a table claims 8 GB."""
    broken = {"type": "Precompiled", "precompiled_charsmap": "AAAA/////w=="}
    change(folder, "tokenizer.json", normalizer=broken)


def panic(folder: Path) -> None:
    """The tokenizer's library panics when it loads: a merge longer than any token."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    longest = max(content["model"]["vocab"], key=len)
    content["model"]["merges"].append([longest, longest])
    file.write_text(json.dumps(content))


def loop(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(ENDLESS_LOOPS)


def pipe(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    os.mkfifo(folder / "tokenizer_config.json")


def multiply(folder: Path) -> None:
    """Encoding an `a` takes 10 GB, or more time than there is."""
    change(
        folder, "tokenizer.json", normalizer={"type": "Sequence", "normalizers": TEN_NORMALIZERS}
    )


def add_tokens(folder: Path) -> None:
    """So many that llguidance takes minutes to read them."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    token = content["added_tokens"][0] | {"special": False, "normalized": True}
    content["added_tokens"] += [
        token | {"id": 3000 + number, "content": f"<{number}>"} for number in range(100_000)
    ]
    file.write_text(json.dumps(content))


def truncate(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)


@pytest.mark.parametrize(
    ("arguments", "damage", "words"),
    [
        (("router", "--port=0"), abort, ["tokenizer.json", "cannot be read"]),
        (("router", "--port=0"), loop, ["chat_template.jinja", "steps"]),
        (("decode", *WORKER), truncate, ["model.safetensors", "outside the file"]),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                (("up", "--port=0", *WORKER), abort, ["cannot start", "tokenizer.json"]),
                (("router", "--port=0"), panic, ["tokenizer.json", "PanicException"]),
                (("router", "--port=0"), pipe, ["tokenizer_config.json", "a pipe"]),
                (("router", "--port=0"), multiply, ["tokenizer.json"]),
                (("prefill", *WORKER), add_tokens, ["tokenizer.json", "takes more than 10 s"]),
                (("decode", *WORKER), abort, ["tokenizer.json", "cannot be read"]),
                (("up", "--port=0", *WORKER), loop, ["cannot start", "chat_template.jinja"]),
            )
        ),
    ],
)
def test_a_process_ends_with_one_line(
    tmp_path: Path,
    valkey: EmbeddedValkey,
    arguments: tuple[str, ...],
    damage: Callable[[Path], None],
    words: list[str],
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder)
    damage(folder)
    line = refusal_of(folder, valkey.url, *arguments)
    assert all(word in line for word in words), line


def test_a_revision_of_a_local_folder_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder)
    assert "revision 'v1' has no meaning" in refusal_of(folder, "", "up", "--revision=v1")
