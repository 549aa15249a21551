"""The list of cached blocks goes to routers in bounded pieces, one for each request."""

from __future__ import annotations

from process.sockets.control import Peer
from protocol.messages import CacheDump, CacheDumpRequest, Role
from protocol.wire import encode, parts
from worker.cache_dumps import PIECE_BLOCKS, CacheDumps

ONE, OTHER = (Peer(name, name.decode(), Role.ROUTER) for name in (b"one", b"other"))
BOTH = [ONE, OTHER]


class Cache:
    """A worker's cache, which changes."""

    def __init__(self, num_blocks: int) -> None:
        self.hashes = [bytes([0xFF]) * 8 + each.to_bytes(8, "big") for each in range(num_blocks)]
        self.seq = 2**40

    def dump(self) -> CacheDump:
        return CacheDump(incarnation="i" * 32, seq=self.seq, hashes=list(self.hashes))

    def change(self) -> None:
        self.seq += 1
        self.hashes.reverse()


def rest_of(dumps: CacheDumps, peer: Peer, piece: CacheDump) -> list[bytes]:
    """All hashes of a list, from its first piece on."""
    hashes = list(piece.hashes)
    while not piece.is_last:
        asked = CacheDumpRequest(nonce=2**63, first=len(hashes))
        piece = dumps.piece(peer, asked, BOTH)
        assert (piece.first, piece.nonce) == (len(hashes), asked.nonce)
        assert len(parts(encode(piece))) == 1
        hashes += piece.hashes
    return hashes


def test_a_list_of_100_000_blocks_comes_in_single_frames() -> None:
    cache = Cache(100_000)
    dumps = CacheDumps(cache.dump)
    first = dumps.piece(ONE, CacheDumpRequest(), BOTH)
    assert len(first.hashes) == PIECE_BLOCKS
    assert rest_of(dumps, ONE, first) == cache.hashes
    assert len(dumps) == 0, "nothing is kept of a list that was read"


def test_small_caches_fit_into_one_piece() -> None:
    for num_blocks in (0, 1, PIECE_BLOCKS):
        cache = Cache(num_blocks)
        piece = CacheDumps(cache.dump).piece(ONE, CacheDumpRequest(nonce=7), BOTH)
        assert piece == CacheDump(
            incarnation=piece.incarnation, seq=cache.seq, hashes=cache.hashes, nonce=7
        )


def test_each_router_reads_the_list_of_the_moment_when_it_asked() -> None:
    cache = Cache(3 * PIECE_BLOCKS)
    dumps = CacheDumps(cache.dump)
    firsts, wholes = {}, {}
    for peer in BOTH:
        wholes[peer] = list(cache.hashes)
        firsts[peer] = dumps.piece(peer, CacheDumpRequest(), BOTH)
        cache.change()
    for peer in BOTH:
        assert rest_of(dumps, peer, firsts[peer]) == wholes[peer]


def test_a_list_that_is_not_here_begins_anew() -> None:
    cache = Cache(2 * PIECE_BLOCKS)
    dumps = CacheDumps(cache.dump)
    dumps.piece(ONE, CacheDumpRequest(), BOTH)
    for first in (2 * PIECE_BLOCKS, -1, 0):
        cache.change()
        piece = dumps.piece(ONE, CacheDumpRequest(first=first), BOTH)
        assert (piece.first, piece.seq) == (0, cache.seq)
        assert piece.hashes == cache.hashes[:PIECE_BLOCKS]
    assert dumps.piece(OTHER, CacheDumpRequest(first=1), BOTH).first == 0


def test_lists_of_routers_that_are_gone_are_dropped() -> None:
    cache = Cache(2 * PIECE_BLOCKS)
    dumps = CacheDumps(cache.dump)
    for peer in BOTH:
        dumps.piece(peer, CacheDumpRequest(), BOTH)
    assert len(dumps) == 2
    dumps.piece(ONE, CacheDumpRequest(), [ONE])
    assert len(dumps) == 1
