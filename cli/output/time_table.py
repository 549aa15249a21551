"""A table of where one request's time went, made from the JSON of its trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

_START, _END, _TOKENS = range(3)
_POSTED, _DONE, _BLOCKS, _CHUNK = range(4)


def time_table(trace: dict[str, Any]) -> Table:
    """A table of phases in order, from the answer to `GET /requests/{id}/trace`."""
    attempt = trace["attempts"][-1]
    prefill, decode = attempt["prefill"], attempt["decode"]
    table = Table(title=f"Where the time of {trace['request_id']} went", title_justify="left")
    table.add_column("phase")
    table.add_column("time", justify="right")
    table.add_column("what happened")
    table.add_row("placement", "", trace["placement"]["reason"])
    worker = prefill or decode or {}
    table.add_row("queue", _ms(trace["queue_ms"]), f"waited on {worker.get('worker_id', '?')}")
    chunks = worker.get("chunks", ())
    table.add_row("prefill", _ms(trace["prefill_ms"]), _prefill_words(worker, chunks))
    if prefill is not None:
        table.add_row("transfer", _ms(_transfer_ms(prefill)), _transfer_words(trace, prefill))
        table.add_row("handoff", _ms(trace["handoff_ms"]), "last chunk done to first decode step")
    table.add_row("first token", _ms(trace["ttft_ms"]), "received to first token sent")
    table.add_row("decode", _ms(trace["decode_ms"]), _decode_words(trace, decode))
    return table


def _prefill_words(worker: dict[str, Any], chunks: Sequence[Any]) -> str:
    computed = sum(chunk[_TOKENS] for chunk in chunks)
    sizes = " + ".join(str(chunk[_TOKENS]) for chunk in chunks)
    cached = worker.get("cached_tokens", 0)
    words = f"{computed} tokens in {len(chunks)} chunks"
    if len(chunks) > 1:
        words += f" ({sizes})"
    return f"{words}, {cached} from the cache" if cached else words


def _transfer_ms(prefill: dict[str, Any]) -> float | None:
    writes = prefill["writes"]
    if not writes:
        return None
    first = min(write[_POSTED] for write in writes)
    return float(max(write[_DONE] for write in writes) - first) / 1000


def _transfer_words(trace: dict[str, Any], prefill: dict[str, Any]) -> str:
    """How many blocks moved, and how many of these arrived before the last chunk ended."""
    writes, chunks = prefill["writes"], prefill["chunks"]
    moved = f"{trace['blocks_moved']} blocks, {trace['bytes_moved'] / 1024:.0f} KiB"
    if not writes or not chunks:
        return f"{moved} over {trace['transport'] or 'no transport'}"
    early = sum(write[_BLOCKS] for write in writes if write[_DONE] <= chunks[-1][_END])
    return f"{moved} over {trace['transport']}; {early} had arrived before the last chunk was done"


def _decode_words(trace: dict[str, Any], decode: dict[str, Any] | None) -> str:
    where = f" on {decode['worker_id']}" if decode else ""
    pace = f", {trace['tpot_ms']:.2f} ms per token" if trace["tpot_ms"] is not None else ""
    return f"{trace['num_output_tokens']} tokens{where}{pace}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} ms"
