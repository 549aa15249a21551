"""The limit on open files is raised as far as the system allows, and never lowered."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.paths import ROOT

CODE = """
import resource
from process.open_files import allow_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
allow_open_files(2000)
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "limit"), [(256, 4096, 2000), (256, 1500, 1500), (3000, 4096, 3000)]
)
def test_the_limit_is_as_near_as_the_hard_limit_allows(soft: int, hard: int, limit: int) -> None:
    code = CODE.format(soft=soft, hard=hard)
    found = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True, timeout=60)
    assert found.split() == [str(limit), str(hard)]
