"""The project's Dockerfiles, read as far as the tests need."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.paths import ROOT

DOCKER = ROOT / "deploy/docker"
KINDS = ("cpu", "cuda")


@dataclass(frozen=True)
class Dockerfile:
    """Instructions in order, as (word, rest); ARGs with defaults are filled in."""

    kind: str
    instructions: list[tuple[str, str]]

    @classmethod
    def read(cls, kind: str) -> Dockerfile:
        """The Dockerfile of an image."""
        text = (DOCKER / f"Dockerfile.{kind}").read_text().replace("\\\n", " ")
        lines = [line.strip() for line in text.splitlines()]
        found = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
        defaults = dict(rest.split("=", 1) for word, rest in found if word == "ARG" and "=" in rest)
        filled = [
            (word, re.sub(r"\$\{(\w+)\}", lambda name: defaults[name[1]], rest))
            for word, rest in found
        ]
        return cls(kind, filled)

    def all(self, word: str) -> list[str]:
        """The arguments of all instructions of this kind."""
        return [rest for each, rest in self.instructions if each == word]

    def steps(self) -> list[list[str]]:
        """The commands that build the image, without options of RUN."""
        return [
            [part for part in rest.split() if not part.startswith("--mount")]
            for rest in self.all("RUN")
        ]


def environment(dockerfile: Dockerfile) -> dict[str, str]:
    """The environment variables that the image sets."""
    pairs = " ".join(dockerfile.all("ENV")).split()
    return dict(pair.split("=", 1) for pair in pairs)


def step_file(command: list[str]) -> Path:
    """The script of the repository that a step runs."""
    return DOCKER / "steps" / Path(command[0]).name
