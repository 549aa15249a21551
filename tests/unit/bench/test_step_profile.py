"""What the step profile makes of perf's report."""

from __future__ import annotations

import pytest

from bench.step_profile import ATTENTION, BETWEEN, LINEAR, OTHER, PYTHON, TORCH, WAITING, shares

REPORT = """
# Total Lost Samples: 0
# Overhead;Shared Object;Symbol;IPC   [IPC Coverage]
 36.50% ;4f2fdb.so          ;[.] baton::multiply_panel<6, 0>   ;-      -
 4.00%  ;4f2fdb.so          ;[.] baton::shared_rows<true>      ;-      -
 6.00%  ;4f2fdb.so          ;[.] baton::attend_unit<baton::Bf16, baton::PairWord>;-      -
 4.00%  ;4f2fdb.so          ;[.] baton::weigh_columns<baton::Bf16, 2, 4>;-      -
 9.50%  ;4f2fdb.so          ;[.] baton::run_layer              ;-      -
 20.00% ;libgomp-a34b3233.so;[.] gomp_team_barrier_wait_end    ;-      -
 10.00% ;libtorch_cpu.so    ;[.] at::native::index_select      ;-      -
 5.00%  ;libpython3.11.so   ;[.] list_ass_item                 ;-      -
 5.00%  ;[kernel.kallsyms]  ;[k] clear_page                    ;-      -
"""


def test_samples_are_put_together_by_what_they_fell_in() -> None:
    expected = {
        LINEAR: 40.5,
        ATTENTION: 10.0,
        BETWEEN: 9.5,
        WAITING: 20.0,
        TORCH: 10.0,
        PYTHON: 5.0,
        OTHER: 5.0,
    }
    assert shares(REPORT) == pytest.approx(expected)
