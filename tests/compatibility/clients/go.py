"""Go's net/http, compiled and run from its source."""

import os
import subprocess
from pathlib import Path

source = Path(__file__).with_name("Baton.go")
subprocess.run(["go", "run", str(source), os.environ["BATON_TEST_URL"]], check=True)
