"""A worker that keeps the KV of layers with windows in groups: `python -m
tests.integration.grouping_worker ROLE ...`. Everything else is the real worker."""

from __future__ import annotations

import sys

from cli.commands import COMMANDS
from engine.checkpoint.config import ModelConfig
from protocol.layout import KvGroup, group_layers


def main(arguments: list[str]) -> int:
    """The role's own main, with layouts in groups."""
    ModelConfig.kv_grouping = _grouping  # type: ignore[method-assign]
    return COMMANDS[arguments[0]].load_main()(arguments[1:])


def _grouping(config: ModelConfig) -> tuple[KvGroup, ...]:
    return group_layers(config.sliding_windows, config.max_position_embeddings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
