"""Loading a checkpoint's tokenizer files, and encoding as they say."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Regex
from tokenizers import Tokenizer as HfTokenizer
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing

from gateway.text.tokenizer import MAX_FREE_IDS, Tokenizer
from protocol.errors import InvalidRequest, ModelLoadError

WAIT_S = 30.0


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint that a test may change."""
    return Path(shutil.copytree(checkpoint, tmp_path / "model"))


@pytest.fixture
def load(folder: Path) -> Iterator[Callable[..., Tokenizer]]:
    """Loads `folder` with changes to its tokenizer_config.json."""
    loaded: list[Tokenizer] = []

    def load_with(**changes: object) -> Tokenizer:
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
        loaded.append(Tokenizer(folder))
        return loaded[-1]

    yield load_with
    for each in loaded:
        each.close()


def add_bos_by_processor(folder: Path) -> None:
    tokenizer = HfTokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))


async def test_text_goes_there_and_back(tokenizer):
    text = "Hello wörld 你好 <|end|>"
    ids = await tokenizer.encode_async(text, add_special_tokens=True)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == text.removesuffix("<|end|>")


def test_special_tokens_are_known(tokenizer):
    assert tokenizer.special_tokens == {"eos_token": "<|end|>"}
    assert tokenizer.special_ids == {0, 1}
    assert tokenizer.eos_id == 1
    assert tokenizer.token_bytes(1) == b"<|end|>"


def test_special_tokens_may_stand_in_a_file_of_their_own(folder, load, tokenizer):
    file = folder / "special_tokens_map.json"
    file.write_text(json.dumps({"bos_token": {"content": "<|start|>"}, "eos_token": "<|start|>"}))
    older = load()
    assert older.special_tokens == {"bos_token": "<|start|>", "eos_token": "<|start|>"}
    assert older.eos_id == 0
    assert load(added_tokens_decoder={}).special_tokens == {"eos_token": "<|end|>"}


def test_a_model_s_own_special_tokens_have_names(load):
    names = {"image_token": "<|start|>", "eos_token": {"content": "<|start|>"}}
    assert load(extra_special_tokens=names).special_tokens == {
        "image_token": "<|start|>",
        "eos_token": "<|start|>",
    }
    assert load(extra_special_tokens=["<|x|>"]).special_tokens == {"eos_token": "<|end|>"}


@pytest.mark.parametrize(
    ("by_processor", "add_bos", "starts_with_bos"),
    [
        (True, None, True),
        (False, None, False),
        (True, False, False),
        (False, True, True),
        (True, True, True),
        (False, False, False),
    ],
)
def test_the_settings_decide_over_the_first_token(
    folder, load, by_processor, add_bos, starts_with_bos
):
    if by_processor:
        add_bos_by_processor(folder)
    changes = {} if add_bos is None else {"add_bos_token": add_bos}
    tokenizer = load(bos_token={"content": "<|start|>"}, **changes)
    plain = tokenizer.encode("Hello", add_special_tokens=False)
    bos = [0] if starts_with_bos else []
    assert tokenizer.encode("Hello", add_special_tokens=True) == bos + plain


def test_tokens_named_by_the_config_alone_are_added(load, tokenizer):
    entry = {"content": "<|call|>", "special": True, "lstrip": False, "rstrip": False}
    entry |= {"single_word": False, "normalized": False}
    next_id = tokenizer.vocab_size
    extended = load(added_tokens_decoder={str(next_id): entry})
    assert extended.encode("a<|call|>", add_special_tokens=False)[-1] == next_id
    assert next_id in extended.special_ids
    assert extended.vocab_size == next_id + 1


@pytest.mark.parametrize(
    "config", [{"vocab_size": 100}, {"vocab_size": None, "text_config": {"vocab_size": 100}}]
)
def test_the_model_s_vocabulary_bounds_the_ids(folder, load, config):
    assert load().stays_in_vocabulary
    (folder / "config.json").write_text(json.dumps(config))
    smaller = load()
    assert smaller.vocab_size == 100
    assert not smaller.stays_in_vocabulary


def test_truncation_in_the_file_is_switched_off(folder, load):
    raw = HfTokenizer.from_file(str(folder / "tokenizer.json"))
    raw.enable_truncation(2)
    raw.enable_padding(length=50)
    raw.save(str(folder / "tokenizer.json"))
    tokenizer = load()
    text = "one two three"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=True)) == text


@pytest.mark.parametrize(
    ("config", "file", "text"),
    [
        ("from config", None, "from config"),
        ([{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}], None, "d"),
        ("from config", "from file", "from file"),
    ],
)
def test_where_the_chat_template_comes_from(folder, load, config, file, text):
    if file:
        (folder / "chat_template.jinja").write_text(file)
    template = load(chat_template=config).chat_template
    assert template is not None
    assert template.render([]) == text


def test_a_checkpoint_may_have_no_chat_template(load):
    tokenizer = load(chat_template=None)
    assert tokenizer.chat_template is tokenizer.tool_template is None


NAMED = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]


@pytest.mark.parametrize(
    ("config", "files", "default", "for_tools"),
    [
        (NAMED, {}, "d", "t"),
        (NAMED[:1], {}, "d", "d"),
        ({"default": "d", "tool_use": "t"}, {}, "d", "t"),
        (NAMED[1:], {}, "t", "t"),
        (None, {"chat_template.jinja": "x"}, "x", "x"),
        (NAMED, {"chat_template.jinja": "x"}, "x", "x"),
        (
            NAMED,
            {"chat_template.jinja": "x", "additional_chat_templates/tool_use.jinja": "y"},
            "x",
            "y",
        ),
        ("d", {"additional_chat_templates/tool_use.jinja": "y"}, "d", "y"),
        (NAMED, {"additional_chat_templates/tool_use.jinja": "y"}, "d", "y"),
        ("d", {"additional_chat_templates/rag.jinja": "y"}, "d", "d"),
        (None, {"chat_template.json": '{"chat_template": "p"}'}, "p", "p"),
        ("d", {"chat_template.json": '{"chat_template": "p"}'}, "d", "d"),
        (None, {"chat_template.json": "{", "chat_template.jinja": "x"}, "x", "x"),
    ],
)
def test_a_template_of_its_own_serves_tools(folder, load, config, files, default, for_tools):
    for name, source in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(source)
    tokenizer = load(chat_template=config)
    assert tokenizer.chat_template.render([]) == default
    assert tokenizer.tool_template.render([]) == for_tools


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "chat_template.json is not valid JSON"),
        ('{"chat_template": 1}', "chat_template.json: 'chat_template' must be a template"),
        ('{"chat_template": "{%"}', "chat_template.json: the chat template cannot be compiled"),
    ],
)
def test_a_bad_template_of_a_processor_is_named(folder, load, content, message):
    (folder / "chat_template.json").write_text(content)
    with pytest.raises(ModelLoadError, match=message):
        load(chat_template=None)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("tokenizer.json", "{}", "tokenizer.json cannot be read as a tokenizer"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json must hold a JSON object"),
    ],
)
def test_a_bad_file_is_named(folder, file, content, message):
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content)
    with pytest.raises(ModelLoadError, match=message):
        Tokenizer(folder)


async def test_the_loop_has_a_turn_between_two_works_that_hold_the_interpreter(
    tokenizer: Tokenizer,
) -> None:
    seen: list[str] = []

    async def count_turns() -> None:
        while True:
            seen.append("turn")
            await asyncio.sleep(0)

    def work(number: int) -> int:
        seen.append(f"begin {number}")
        seen.append(f"end {number}")
        return number

    counting = asyncio.create_task(count_turns())
    works = [tokenizer.in_turn(lambda number=number: work(number)) for number in range(20)]
    assert await asyncio.gather(*works) == list(range(20))
    counting.cancel()
    for number in range(19):
        between = seen[seen.index(f"end {number}") : seen.index(f"begin {number + 1}")]
        assert "turn" in between


async def test_long_prompts_do_not_delay_a_part_of_an_answer(tokenizer: Tokenizer) -> None:
    release = threading.Event()
    prompts = [asyncio.ensure_future(tokenizer.in_thread(release.wait)) for _ in range(3)]
    try:
        async with asyncio.timeout(WAIT_S):
            assert await tokenizer.for_answer(lambda: "answered") == "answered"
        assert not any(each.done() for each in prompts)
    finally:
        release.set()
        await asyncio.gather(*prompts)


class _LongEncoding:
    """Says in its ids whether the thread that makes a list of them holds a lock."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def __len__(self) -> int:
        return MAX_FREE_IDS + 1

    @property
    def ids(self) -> list[int]:
        return [int(self._lock.locked())]


def test_one_thread_at_a_time_makes_a_long_list_of_ids(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    """The interpreter's lock is held meanwhile: two would pass it to each other."""
    long = _LongEncoding(tokenizer._long_list)
    encoder = SimpleNamespace(encode_batch_fast=lambda *_, **__: [long])
    monkeypatch.setattr(tokenizer, "_tokenizer", encoder)
    assert tokenizer.encode("x" * 100_000, add_special_tokens=False) == [1]
    assert not tokenizer._long_list.locked()


async def test_a_pattern_that_gives_up_on_a_text_is_an_error_of_the_request(folder, load):
    """The library panics then, with a BaseException."""
    tokenizer = HfTokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.pre_tokenizer = Split(Regex(r"(?:(?:x|xx)+)+\b$y"), "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    loaded = load()
    for text in ("x" * 40, "x" * 4000):
        with pytest.raises(InvalidRequest, match="cannot encode this text"):
            await loaded.encode_async(text, add_special_tokens=True)
    assert loaded.encode("a", add_special_tokens=False)
