"""Weights that one worker sends to another, over real sockets and transports, in one process."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file

from engine.checkpoint.config import load_model_config
from engine.checkpoint.files import model_fingerprint
from engine.checkpoint.stored_tensors import FileTensors
from engine.checkpoint.weights import load_weights
from kv_transfer.transports.interface import Transport, WriteDone
from kv_transfer.transports.memory_file import SharedMemory
from kv_transfer.transports.registry import create_transport
from kv_transfer.transports.shm import ShmTransport
from protocol.errors import ModelLoadError, TransferError
from protocol.messages import Role
from protocol.registration import WorkerInfo
from protocol.weight_messages import StoredTensor, WeightsAsk, WeightsGrant, WeightsOffer
from tests.paths import DEMO_MODEL
from tests.weights_sender import SECRET, Sender, means, sending
from worker.weights.peer_tensors import Asker, PeerTensors
from worker.weights.server import MOST_AT_ONCE, TransferMeans

ASKER = Asker("decode-2", Role.DECODE, SECRET)
BLOCK_BYTES, NUM_BLOCKS = 64 * 1024, 6


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The demo model, whose files a test may change."""
    found = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, found)
    return found


@contextmanager
def asking(info: WorkerInfo, by: TransferMeans, blocks: int = NUM_BLOCKS) -> Iterator[PeerTensors]:
    tensors = PeerTensors(info, ASKER, by, BLOCK_BYTES, blocks)
    try:
        yield tensors
    finally:
        tensors.hang_up()
        tensors.release()


@pytest.mark.parametrize("transport", ["shm", "nixl"])
def test_each_tensor_arrives_as_it_is_stored(folder: Path, transport: str) -> None:
    stored = FileTensors(folder)
    with sending(folder, means(transport)) as sender, asking(sender.info, means(transport)) as got:
        got.open()
        assert got.fingerprint == model_fingerprint(folder)
        in_order = sorted(stored.entries, key=lambda name: stored.entries[name].begin)
        assert list(got.entries) == in_order
        for name in in_order[::2]:  # those between them are passed over
            found, expected = got.read(name), stored.read(name)
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)
        got.finish()
        assert got.num_bytes > (folder / "model.safetensors").stat().st_size - 64 * 1024


def test_a_model_is_loaded_from_them(folder: Path) -> None:
    config = load_model_config(folder)
    expected = load_weights(folder, config)
    with sending(folder, means()) as sender, asking(sender.info, means()) as got:
        found = load_weights(got.open(), config)
        assert got.is_finished
    assert torch.equal(found.embed, expected.embed)  # type: ignore[arg-type]
    for mine, theirs in zip(found.layers, expected.layers, strict=True):
        assert torch.equal(mine.attention.matrices["qkv"], theirs.attention.matrices["qkv"])  # type: ignore[arg-type]
        assert torch.equal(mine.feed_forward.matrices["down"], theirs.feed_forward.matrices["down"])  # type: ignore[arg-type]


def test_no_more_is_written_than_is_granted(folder: Path) -> None:
    written: list[tuple[int, int]] = []  # a piece, and what was granted by then

    class RecordingTransport(ShmTransport):
        def post_write(self, agent: str, source: Any, target: Any, notification: bytes) -> int:
            granted = [each.num_pieces for each in sender.taken if isinstance(each, WeightsGrant)]
            written.append((int.from_bytes(notification, "little"), max(granted)))
            return super().post_write(agent, source, target, notification)

    recording = replace(means(), open=lambda: RecordingTransport("recording", "cpu"))
    with sending(folder, recording) as sender, asking(sender.info, means(), blocks=3) as got:
        load_weights(got.open(), load_model_config(folder))
    assert [piece for piece, _ in written] == list(range(len(written)))
    assert len(written) > (folder / "model.safetensors").stat().st_size // BLOCK_BYTES - 1
    assert all(granted - 3 <= piece < granted for piece, granted in written)


def test_a_block_is_filled_again_only_once_its_write_is_over(folder: Path) -> None:
    """The asker has a piece before the sender learns that its write is over."""
    refilled: list[int] = []

    class LateTransport(ShmTransport):
        num_polls = 0

        def __init__(self) -> None:
            super().__init__("late", "cpu")
            self.busy: dict[int, int] = {}  # the block that is written from, by handle
            self.late: list[tuple[int, WriteDone]] = []

        def post_write(self, agent: str, source: Any, target: Any, notification: bytes) -> int:
            refilled.extend(block for block in source if block in self.busy.values())
            handle = super().post_write(agent, source, target, notification)
            self.busy[handle] = source[0]
            return handle

        def poll(self) -> list[Any]:
            self.num_polls += 1
            events: list[Any] = []
            for event in super().poll():
                if isinstance(event, WriteDone):
                    self.late.append((self.num_polls + 20, event))
                else:
                    events.append(event)
            due = [event for at, event in self.late if at <= self.num_polls]
            self.late = [each for each in self.late if each[0] > self.num_polls]
            for event in due:
                del self.busy[event.handle]
            return events + due

    late = replace(means(), open=LateTransport)
    with sending(folder, late) as sender, asking(sender.info, means(), blocks=3) as got:
        load_weights(got.open(), load_model_config(folder))
    assert refilled == []


class SpoilingTransport(ShmTransport):
    """Changes a bit of the third piece on its way."""

    num_written = 0

    def allocate(self, num_bytes: int) -> SharedMemory | None:
        self.memory = super().allocate(num_bytes)
        return self.memory

    def post_write(self, agent: str, source: Any, target: Any, notification: bytes) -> int:
        self.num_written += 1
        if self.num_written == 3:
            assert self.memory is not None
            self.memory.view[source[0] * BLOCK_BYTES + 5] ^= 1
        return super().post_write(agent, source, target, notification)


def test_a_changed_bit_is_found(folder: Path) -> None:
    def spoiling() -> Transport:
        return SpoilingTransport("spoiling", "cpu")

    with (
        sending(folder, replace(means(), open=spoiling)) as sender,
        asking(sender.info, means()) as got,
        pytest.raises(TransferError, match=r"has another digest here than at worker decode-1"),
    ):
        load_weights(got.open(), load_model_config(folder))


def test_a_peer_that_falls_silent_is_given_up(folder: Path) -> None:
    def is_late_grant(message: Any) -> bool:
        return isinstance(message, WeightsGrant) and message.num_pieces > NUM_BLOCKS

    with (
        sending(folder, means(), ignores=is_late_grant) as sender,
        asking(sender.info, means(patience_s=2.0)) as got,
    ):
        with pytest.raises(TransferError, match="nothing has come from it for 2 s"):
            load_weights(got.open(), load_model_config(folder))
        assert not got.is_finished


def test_a_worker_that_knows_no_weights_is_given_up(folder: Path) -> None:
    with (
        sending(folder, means(), ignores=lambda message: True) as sender,
        asking(sender.info, means(patience_s=0.5)) as got,
        pytest.raises(TransferError, match=r"nothing has come from it for 0\.5 s"),
    ):
        got.open()


def refusal(folder: Path, spoil: Callable[[Sender], object], by: TransferMeans) -> str:
    with sending(folder, means()) as sender, asking(sender.info, by) as got:
        spoil(sender)
        with pytest.raises(TransferError) as error:
            got.open()
    return str(error.value)


def test_a_checkpoint_that_has_changed_is_not_sent(folder: Path) -> None:
    file = folder / "model.safetensors"

    def change(sender: Sender) -> None:
        tensors = load_file(file)
        tensors["model.norm.weight"][:] = 3.0
        save_file(tensors, file)

    assert refusal(folder, change, means()) == "its checkpoint has changed since it was loaded"
    missing = refusal(folder, lambda sender: file.rename(file.with_suffix(".gone")), means())
    assert "holds no weights" in missing


def test_strangers_and_other_transports_are_refused(folder: Path) -> None:
    stranger = replace(means(), secret=b"another secret")
    assert "is not authentic" in refusal(folder, lambda sender: None, stranger)
    other = replace(means("nixl"), open=lambda: create_transport("shm", "cpu"))
    assert refusal(folder, lambda sender: None, other) == "its transport is shm, not nixl"


def test_few_are_served_at_once(folder: Path) -> None:
    with sending(folder, means()) as sender:
        asked = [PeerTensors(sender.info, ASKER, means(), BLOCK_BYTES) for _ in range(MOST_AT_ONCE)]
        try:
            for each in asked:
                each.open()
            with asking(sender.info, means()) as late:
                with pytest.raises(TransferError, match="it sends its weights to 4 others"):
                    late.open()
            load_weights(asked[0], load_model_config(folder))
        finally:
            for each in asked:
                each.hang_up()
                each.release()
    assert sum(isinstance(each, WeightsAsk) for each in sender.taken) == MOST_AT_ONCE + 1


def offering(info: StoredTensor, *more: StoredTensor) -> WeightsOffer:
    return WeightsOffer(ask="", fingerprint="f", tensors=[info, *more])


TENSOR = StoredTensor(name="model.norm.weight", dtype="F32", shape=(4,), num_bytes=16)


@pytest.mark.parametrize(
    ("offer", "reason"),
    [
        (offering(TENSOR, TENSOR), "offers tensor 'model.norm.weight' twice"),
        (offering(TENSOR), "nothing has come from it"),
        (offering(structs.replace(TENSOR, num_bytes=2**53)), "which do not hold"),
        (offering(structs.replace(TENSOR, shape=(2**53,) * 16)), "which do not hold"),
        (offering(structs.replace(TENSOR, dtype="../x")), "which do not hold"),
        (offering(structs.replace(TENSOR, name="padding", num_bytes=2**53), TENSOR), "not use"),
    ],
)
def test_a_peer_whose_offer_is_a_lie_is_given_up(
    folder: Path, offer: WeightsOffer, reason: str
) -> None:
    """It offers, again and again, and never sends a piece."""

    def lie(message: Any) -> bool:
        if isinstance(message, WeightsAsk):
            (asker,) = sender.server.peers  # it may leave after the first offer
            for _ in range(3):
                sender.server.send(asker, structs.replace(offer, ask=message.ask))
        return True

    patience_s = 0.5 if reason == "nothing has come from it" else 60.0
    with (
        sending(folder, means(), ignores=lie) as sender,
        asking(sender.info, means(patience_s=patience_s)) as got,
        pytest.raises((TransferError, ModelLoadError), match=reason),
    ):
        got.open().read(TENSOR.name)


@pytest.mark.parametrize("claimed", [b"\xff" * 8, b"\xff" * 500, (10**6).to_bytes(8, "little")])
def test_a_piece_that_was_not_granted_ends_the_transfer(folder: Path, claimed: bytes) -> None:
    class LyingTransport(ShmTransport):
        def post_write(self, agent: str, source: Any, target: Any, notification: bytes) -> int:
            return super().post_write(agent, source, target, claimed)

    lying = replace(means(), open=lambda: LyingTransport("lying", "cpu"))
    with (
        sending(folder, lying) as sender,
        asking(sender.info, means()) as got,
        pytest.raises(TransferError, match="not granted"),
    ):
        load_weights(got.open(), load_model_config(folder))
