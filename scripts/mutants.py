"""Mutation testing of the modules that decide: how many small faults do their own unit tests find?

Draws mutants by a seed (cosmic-ray's operators), runs each against its module's unit tests in a
forked process, and prints the share that fails a test, with every survivor. A mutant whose tests
do not end in time counts as found. No file is changed: the mutant is what its process imports.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.machinery
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import hypothesis
import msgspec
import pytest
import torch
import uvloop
import zmq.asyncio
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators import provider

PRELOADED = (hypothesis, msgspec, pytest, torch, uvloop, zmq.asyncio)
"""Imported once, before mutants fork: a mutant's process imports only our own modules."""
ROOT = Path(__file__).parents[1]
TIMEOUT_S = 60.0
OPERATORS = [
    provider.OperatorProvider()[name]
    for name in (
        "NumberReplacer",
        "AddNot",
        "ReplaceAndWithOr",
        "ReplaceOrWithAnd",
        "ReplaceTrueWithFalse",
        "ReplaceFalseWithTrue",
        "ReplaceBreakWithContinue",
        "ReplaceContinueWithBreak",
        "ZeroIterationForLoop",
        "ReplaceUnaryOperator_Delete_Not",
        "ReplaceUnaryOperator_USub_UAdd",
        "ReplaceBinaryOperator_Add_Sub",
        "ReplaceBinaryOperator_Sub_Add",
        "ReplaceBinaryOperator_Mul_Div",
        "ReplaceBinaryOperator_FloorDiv_Mul",
        "ReplaceComparisonOperator_Eq_NotEq",
        "ReplaceComparisonOperator_NotEq_Eq",
        "ReplaceComparisonOperator_Is_IsNot",
        "ReplaceComparisonOperator_IsNot_Is",
        "ReplaceComparisonOperator_Lt_LtE",
        "ReplaceComparisonOperator_Lt_GtE",
        "ReplaceComparisonOperator_LtE_Lt",
        "ReplaceComparisonOperator_LtE_Gt",
        "ReplaceComparisonOperator_Gt_GtE",
        "ReplaceComparisonOperator_Gt_LtE",
        "ReplaceComparisonOperator_GtE_Gt",
        "ReplaceComparisonOperator_GtE_Lt",
    )
]
"""The operators whose mutants are neither type errors nor equal to the program."""


@dataclass(frozen=True)
class Subject:
    """Modules, and the unit tests that are to find their faults."""

    name: str
    modules: Sequence[str]
    tests: Sequence[str]


SUBJECTS = [
    Subject(
        "scheduler",
        ["scheduling/scheduler.py", "scheduling/block_manager.py"],
        [
            "tests/unit/scheduling/test_scheduler.py",
            "tests/unit/scheduling/test_scheduler_history.py",
            "tests/unit/scheduling/test_target_shares.py",
            "tests/unit/scheduling/test_steps_under_way.py",
            "tests/unit/scheduling/test_block_manager.py",
        ],
    ),
    Subject(
        "placement",
        ["router/routing/policy.py", "router/routing/candidates.py"],
        [
            "tests/unit/router/routing/test_policy.py",
            "tests/unit/router/routing/test_placement_costs.py",
            "tests/unit/router/routing/test_random_scenes.py",
        ],
    ),
    Subject(
        "handoff",
        [
            "kv_transfer/handoff/key.py",
            "kv_transfer/handoff/states.py",
            "kv_transfer/handoff/sink.py",
            "kv_transfer/handoff/source.py",
        ],
        [
            "tests/unit/kv_transfer/handoff/test_sink.py",
            "tests/unit/kv_transfer/handoff/test_source.py",
            "tests/unit/kv_transfer/handoff/test_pair.py",
        ],
    ),
    Subject(
        "retries",
        [
            "router/requests/machine/retries.py",
            "router/requests/machine/attempt.py",
            "router/requests/machine/generation.py",
        ],
        [
            "tests/unit/router/requests/machine/test_failure_history.py",
            "tests/unit/router/requests/machine/test_generation.py",
            "tests/unit/router/requests/test_dispatcher.py",
            "tests/unit/router/requests/test_retries.py",
            "tests/unit/router/requests/test_deaths.py",
            "tests/unit/router/requests/test_ends.py",
            "tests/unit/router/requests/test_handover.py",
        ],
    ),
]


@dataclass(frozen=True)
class Mutant:
    """One change of one module."""

    subject: Subject
    module: str
    line: int
    operator: type
    occurrence: int

    def __str__(self) -> str:
        return f"{self.module}:{self.line} {self.operator.__name__} #{self.occurrence}"


class MutantFinder(MetaPathFinder, Loader):
    """Imports the mutant's module from its changed source."""

    def __init__(self, mutant: Mutant) -> None:
        self._path = ROOT / mutant.module
        self._name = mutant.module.removesuffix(".py").replace("/", ".")
        self._source = mutate_code(self._path.read_text(), mutant.operator(), mutant.occurrence)
        assert self._source is not None, mutant

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        """The module's own spec, loaded by this object; None for every other module."""
        if fullname != self._name:
            return None
        spec = importlib.machinery.ModuleSpec(fullname, self, origin=str(self._path))
        spec.has_location = True
        return spec

    def exec_module(self, module: ModuleType) -> None:
        """Run the changed source."""
        exec(compile(self._source, str(self._path), "exec"), module.__dict__)


def main() -> int:
    """Exit status 1 if fewer mutants are killed than `--at-least` asks for."""
    parser = argparse.ArgumentParser(prog="./scripts/mutants", description=__doc__)
    parser.add_argument("--mutants", type=int, default=300, help="how many are drawn (300)")
    parser.add_argument("--seed", type=int, default=34, help="of the draw (34)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at once")
    parser.add_argument("--at-least", type=float, default=0.0, help="percentage to be killed (0)")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    for subject in SUBJECTS:
        assert not fails(subject, None), f"the tests of {subject.name} fail without a mutant"
    drawn = draw(arguments.mutants, random.Random(arguments.seed))
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        killed = []
        for found in pool.map(lambda mutant: fails(mutant.subject, mutant), drawn):
            killed.append(found)
            if len(killed) % 25 == 0:
                print(f"{len(killed)} of {len(drawn)} tried", file=sys.stderr)
    for mutant, found in zip(drawn, killed, strict=True):
        if not found:
            print(f"survived: {mutant}")
    for subject in SUBJECTS:
        own = [
            found for mutant, found in zip(drawn, killed, strict=True) if mutant.subject is subject
        ]
        print(f"{subject.name}: {sum(own)} of {len(own)} killed")
    share = 100 * sum(killed) / len(killed)
    print(f"{sum(killed)} of {len(killed)} mutants killed: {share:.1f} %")
    return int(share < arguments.at_least)


def draw(number: int, rng: random.Random) -> list[Mutant]:
    """`number` mutants: the same number of each subject, as long as it has any."""
    pools = [list(mutants_of(subject)) for subject in SUBJECTS]
    for pool in pools:
        rng.shuffle(pool)
    drawn: list[Mutant] = []
    while len(drawn) < number and any(pools):
        drawn += [pool.pop() for pool in pools if pool]
    return drawn[:number]


def mutants_of(subject: Subject) -> Iterator[Mutant]:
    """All mutants, in the order of the source."""
    for module in subject.modules:
        text = (ROOT / module).read_text()
        lines = text.splitlines()
        nodes = list(ast_nodes(get_ast(text)))
        for operator in OPERATORS:
            places = (start for node in nodes for start, _ in operator().mutation_positions(node))
            for occurrence, (line, _) in enumerate(places):
                if not lines[line - 1].lstrip().startswith("@"):  # frozen=True, slots=True
                    yield Mutant(subject, module, line, operator, occurrence)


def fails(subject: Subject, mutant: Mutant | None) -> bool:
    """Whether a test of the subject fails, or does not end, with the mutant in place."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = _run_tests(subject, mutant)
        finally:
            os._exit(status)
    timer = threading.Timer(TIMEOUT_S, os.killpg, (child, signal.SIGKILL))
    timer.start()
    _, status = os.waitpid(child, 0)
    timer.cancel()
    return status != 0


def _run_tests(subject: Subject, mutant: Mutant | None) -> int:
    os.setpgid(0, 0)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.dup2(nowhere, sys.stderr.fileno())
    os.chdir(ROOT)
    if mutant is not None:
        sys.meta_path.insert(0, MutantFinder(mutant))
    tests = [str(ROOT / test) for test in subject.tests]
    quietly = [
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore::pytest.PytestAssertRewriteWarning",
    ]
    return int(pytest.main([*quietly, *tests]))


if __name__ == "__main__":
    sys.exit(main())
