"""Published results beside ours: the parts that need no recorded trace."""

from __future__ import annotations

from bench.published import sarathi
from bench.published.mooncake import hit_share
from bench.published.results import Result, Row


def test_a_common_cache_finds_what_others_computed() -> None:
    prompts = [[1, 2], [1, 3], [1, 2], [1, 3]]
    assert hit_share(prompts, 1, 100) == 5 / 8
    assert hit_share(prompts, 2, 100) == 4 / 8, "each node has its own prompts again"
    assert hit_share(prompts, 1, 1) == 0, "the last block pushes out the first"


def test_chunks_gain_most_at_the_published_ratio() -> None:
    result = sarathi.chunk_rule((4, 15, 50), num_batches=4)
    peak = result.rows[-1]
    assert peak.ours == 15
    assert peak.theirs == 256 / 17


def test_figures_are_shown_as_multiples() -> None:
    rows = [Row("a", 2.0, 30.0), Row("b", 4.0, 45.0), Row("c", None, 15.0)]
    table = Result("t", " s", rows, "a").table()
    cells = [list(column.cells) for column in table.columns]
    assert cells[3] == ["1.00x", "2.00x", "-"]
    assert cells[4] == ["1.00x", "1.50x", "0.50x"]
