"""A table of where one request's time went, made from the JSON of its trace. It shows the same
stages as the dashboard, and the rows of a part add up to that part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table

from process.number_text import count, ms, size, tenths

_END, _TOKENS = 1, 2
_DONE, _BLOCKS = 1, 2
_FIRST, _REST = "first_token", "rest"


def time_table(trace: dict[str, Any]) -> Table:
    """A table of stages in order, from the answer to `GET /requests/{id}/trace`."""
    attempt = trace["attempts"][-1]
    prefill, decode = attempt["prefill"], attempt["decode"]
    table = Table(title=f"Where the time of {trace['request_id']} went", title_justify="left")
    table.add_column("stage")
    table.add_column("time", justify="right")
    table.add_column("what happened")
    table.add_row("reason", "", trace["placement"]["reason"])
    if trace.get("error"):
        table.add_row("error", "", trace["error"])
    if trace.get("predicted_ttft_ms") is not None:
        table.add_row("forecast", _shown_ms(trace["predicted_ttft_ms"]), _cost_words(trace))
    if worker := prefill or decode:
        table.add_row("prompt", "", _prompt_words(worker))
    if prefill is not None:
        table.add_row("KV", "", _transfer_words(trace, prefill), end_section=True)
    is_running = trace["outcome"] == "running"
    without = "until now, without a token" if is_running else "until the end, without a token"
    first = "received to first token sent" if trace["first_token_us"] else without
    for part, name, words in (
        (_FIRST, "first token", first),
        (_REST, "to the last", _output_words(trace, decode)),
    ):
        stages = [each for each in trace["stages"] if each["part"] == part]
        rows = list(_rows(stages))
        for row in rows:
            table.add_row(*row)
        if rows:
            table.add_row(name, _shown_ms(sum(each["ms"] for each in stages)), words)
            table.rows[-1].end_section = True
    return table


def _rows(stages: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """A row for each stage that shows a time. Rounded to tenths, they add up to their rounded
    sum."""
    end = 0.0
    for each in stages:
        begin, end = end, end + each["ms"]
        shown = round(round(end, 1) - round(begin, 1), 1)
        if shown:
            words = ": ".join(filter(None, (each["where"], each["text"])))
            yield each["stage"].replace("_", " "), _shown_ms(shown), words


def _shown_ms(value: float) -> str:
    return f"{tenths(value)} ms"


def _cost_words(trace: dict[str, Any]) -> str:
    """The predicted cost of the placement, and that of the best placement of the other kind."""
    placement = trace["placement"]
    words = f"to the first token; everybody's time: {ms(placement['cost_ms'])}"
    other = placement["alternative"]
    if other is None:
        return words
    named = " → ".join(filter(None, (other["prefill"], other["decode"])))
    return f"{words}, on {named}: {ms(other['cost_ms'])}"


def _prompt_words(worker: dict[str, Any]) -> str:
    sizes = [chunk[_TOKENS] for chunk in worker["chunks"]]
    words = f"{count(sum(sizes), 'token')} in {count(len(sizes), 'chunk')}"
    if len(sizes) > 1:
        words += f" ({' + '.join(map(str, sizes))})"
    cached = worker["cached_tokens"]
    return f"{words}, {cached} from the cache" if cached else words


def _transfer_words(trace: dict[str, Any], prefill: dict[str, Any]) -> str:
    """How many blocks moved, and how many of these arrived before the last chunk ended."""
    writes, chunks = prefill["writes"], prefill["chunks"]
    moved = f"{count(trace['blocks_moved'], 'block')}, {size(trace['bytes_moved'])}"
    if not writes or not chunks:
        return f"{moved} over {trace['transport'] or 'no transport'}"
    early = sum(write[_BLOCKS] for write in writes if write[_DONE] <= chunks[-1][_END])
    return f"{moved} over {trace['transport']}; {early} had arrived before the last chunk was done"


def _output_words(trace: dict[str, Any], decode: dict[str, Any] | None) -> str:
    where = f" on {decode['worker_id']}" if decode else ""
    pace = f", {ms(trace['tpot_ms'])} per token" if trace["tpot_ms"] is not None else ""
    return f"{count(trace['num_output_tokens'], 'token')}{where}{pace}"
