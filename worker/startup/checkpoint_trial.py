"""The child process in which a worker first reads its tokenizer, see `checkpoint.trial`.

Only grammars need the tokenizer on a worker. A tokenizer that llguidance does not support is no
error, but one that crashes or stalls llguidance is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from checkpoint.regular_file import is_there, open_regular
from checkpoint.trial import limit_this_process, run_steps
from checkpoint.vocabularies.tokenizer_json import tokenizer_file
from engine.checkpoint.config import load_model_config
from engine.sampling.grammar import Grammars


def main(argv: Sequence[str]) -> int:
    """Read the files of the folder `argv[0]`. Returns the exit status."""
    folder = Path(argv[0])
    limit_this_process()
    return run_steps(
        (folder / "config.json", lambda: load_model_config(folder)),
        (tokenizer_file(folder), lambda: _read_vocabulary(folder)),
    )


def _read_vocabulary(folder: Path) -> None:
    file = tokenizer_file(folder)
    if not is_there(file):
        return
    open_regular(file).close()
    config = load_model_config(folder)
    Grammars(file, config.vocab_size, config.eos_token_ids).close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
