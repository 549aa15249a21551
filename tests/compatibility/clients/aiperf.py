"""aiperf: a short profile of streamed chats."""

import os
import subprocess
import tempfile

with tempfile.TemporaryDirectory() as folder:
    command = ["aiperf", "profile", "--model", "demo_model", "--url", os.environ["BATON_TEST_URL"]]
    command += ["--endpoint-type", "chat", "--streaming", "--tokenizer", "builtin"]
    command += ["--request-count", "8", "--concurrency", "2", "--output-artifact-dir", folder]
    command += ["--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "16", "--ui", "none"]
    subprocess.run(command, check=True)
