"""Incremental decoding: equal to decoding at once, and never half a character."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as HfTokenizer

from gateway.text.detokenizer import Detokenizer
from gateway.text.token_bytes import TokenBytes
from protocol.errors import ModelLoadError
from tests.paths import DEMO_MODEL

SAMPLE = ["Hello wörld, 你好 😀!", "the cat sat on the mat", "\n\t  spaces   here"]


def byte_level() -> HfTokenizer:
    tokenizer = HfTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(SAMPLE, trainer)
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("crème brûlée"), AddedToken("思")])
    return tokenizer


def sentencepiece(decoder: decoders.Decoder) -> HfTokenizer:
    """As Llama 2 and Mistral have it: metaspace, and bytes for what the vocabulary lacks."""
    pieces = ["<unk>", "<s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    pieces += ["▁", *"abcdeHlorw", "▁a", "▁w", "ll"]
    vocab = {piece: rank for rank, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("▁", "w"), ("l", "l")]
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    tokenizer = HfTokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


LLAMA = decoders.Sequence(
    [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
)
BYTE_LEVEL = byte_level()
SENTENCEPIECE = sentencepiece(LLAMA)


def pieces_of(
    tokenizer: HfTokenizer, ids: list[int], skipped: frozenset[int] = frozenset()
) -> list[str]:
    detokenizer = Detokenizer(TokenBytes(tokenizer), skipped, at_start=True)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


@given(st.text())
def test_text_survives_one_token_at_a_time(text):
    ids = BYTE_LEVEL.encode(text).ids
    pieces = pieces_of(BYTE_LEVEL, ids)
    assert "".join(pieces) == BYTE_LEVEL.decode(ids, skip_special_tokens=False) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 2)))
def test_any_token_ids_equal_decoding_at_once(ids):
    """Broken UTF-8 and ids without a token included."""
    whole = BYTE_LEVEL.decode(ids, skip_special_tokens=False)
    assert "".join(pieces_of(BYTE_LEVEL, ids)) == whole


@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1)))
def test_tokens_that_were_seen_before_decode_the_same(ids):
    """Inside of a character, too, where a remembered text must not be used."""
    table = TokenBytes(BYTE_LEVEL)
    for token_id in range(BYTE_LEVEL.get_vocab_size()):
        table.of(token_id)
    detokenizer = Detokenizer(table, frozenset(), at_start=True)
    text = "".join([*map(detokenizer.push, ids), detokenizer.flush()])
    assert text == BYTE_LEVEL.decode(ids, skip_special_tokens=False)


@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1)))
def test_skipped_tokens_leave_no_trace(ids):
    end = BYTE_LEVEL.token_to_id("<|end|>")
    whole = BYTE_LEVEL.decode(ids, skip_special_tokens=True)
    assert "".join(pieces_of(BYTE_LEVEL, ids, frozenset([end]))) == whole


@given(st.text())
def test_sentencepiece_text_survives_one_token_at_a_time(text):
    ids = SENTENCEPIECE.encode(text.replace("▁", "_")).ids
    assert "".join(pieces_of(SENTENCEPIECE, ids)) == SENTENCEPIECE.decode(ids)


def test_a_character_leaves_only_when_it_is_whole():
    ids = [id_ for byte in "😀".encode() for id_ in [SENTENCEPIECE.token_to_id(f"<0x{byte:02X}>")]]
    assert pieces_of(SENTENCEPIECE, ids) == ["", "", "", "😀", ""]
    assert pieces_of(SENTENCEPIECE, ids[:3]) == ["", "", "", "\ufffd"]


def test_the_leading_space_is_kept_where_a_prompt_precedes():
    ids = SENTENCEPIECE.encode("hello world").ids
    assert SENTENCEPIECE.id_to_token(ids[0]) == "▁"
    table = TokenBytes(SENTENCEPIECE)
    first = Detokenizer(table, frozenset(), at_start=True)
    later = Detokenizer(table, frozenset(), at_start=False)
    assert "".join(map(first.push, ids)).startswith("h")
    assert "".join(map(later.push, ids)).startswith(" h")


def test_metaspace_decodes_like_the_library():
    tokenizer = sentencepiece(decoders.Metaspace())
    ids = tokenizer.encode("hello a world").ids
    known = [id_ for id_ in ids if not tokenizer.id_to_token(id_).startswith("<0x")]
    assert "".join(pieces_of(tokenizer, known)) == tokenizer.decode(known)


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        (decoders.WordPiece(), "WordPiece"),
        (None, "none"),
        (decoders.Strip("x", 1, 0), "Strip"),
        (decoders.Sequence([decoders.Fuse(), decoders.CTC()]), "CTC"),
    ],
)
def test_a_decoder_of_another_kind_is_refused_by_name(decoder, named):
    tokenizer = HfTokenizer(models.BPE())
    if decoder is not None:
        tokenizer.decoder = decoder
    with pytest.raises(ModelLoadError, match=named):
        TokenBytes(tokenizer)


STYLES = {
    "byte-level": BYTE_LEVEL,
    "sentencepiece": SENTENCEPIECE,
    "demo model": HfTokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")),
}


def ids_by_bytes(tokenizer: HfTokenizer) -> dict[bytes, int]:
    """Tokens by what they contribute to the text, those of single bytes among them."""
    table = TokenBytes(tokenizer)
    return {table.of(id_): id_ for id_ in reversed(range(tokenizer.get_vocab_size()))}


BY_BYTES = {name: ids_by_bytes(tokenizer) for name, tokenizer in STYLES.items()}
MANY_BYTES = st.text(
    st.one_of(
        st.characters(min_codepoint=0x80, exclude_categories=["Cs"]),
        st.sampled_from("a é你😀👩\u200d🚀🇩\ufe0f\u0301"),
    ),
    max_size=12,
)


@pytest.mark.parametrize("style", sorted(STYLES))
@given(text=MANY_BYTES, data=st.data())
def test_a_text_survives_being_cut_into_tokens_at_any_byte(style, text, data):
    by_bytes = BY_BYTES[style]
    whole, ids = text.encode(), []
    while whole:
        sizes = [size for size in range(1, 9) if whole[:size] in by_bytes]
        size = data.draw(st.sampled_from(sizes))
        ids.append(by_bytes[whole[:size]])
        whole = whole[size:]
    detokenizer = Detokenizer(TokenBytes(STYLES[style]), frozenset(), at_start=False)
    pieces = [*map(detokenizer.push, ids), detokenizer.flush()]
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("style", sorted(STYLES))
@given(data=st.data())
def test_any_bytes_decode_as_python_decodes_them(style, data):
    """Also what is no UTF-8 at all: one token a byte, an error shown as soon as it is one."""
    by_bytes = BY_BYTES[style]
    raw = data.draw(st.binary(max_size=24))
    raw = b"".join(bytes([byte]) for byte in raw if bytes([byte]) in by_bytes)
    detokenizer = Detokenizer(TokenBytes(STYLES[style]), frozenset(), at_start=False)
    pieces = [detokenizer.push(by_bytes[bytes([byte])]) for byte in raw]
    assert "".join([*pieces, detokenizer.flush()]) == raw.decode(errors="replace")
