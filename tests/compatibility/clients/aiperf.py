"""aiperf: a short profile of streamed chats, every request of which is answered."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

MODEL = Path(__file__).resolve().parents[3] / "demo_model"
NUM_REQUESTS = 8

with tempfile.TemporaryDirectory() as folder:
    command = ["aiperf", "profile", "--model", "demo_model", "--url", os.environ["BATON_TEST_URL"]]
    command += ["--endpoint-type", "chat", "--streaming", "--tokenizer", str(MODEL), "--ui", "none"]
    command += ["--request-count", str(NUM_REQUESTS), "--concurrency", "2"]
    command += ["--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "16"]
    command += ["--output-artifact-dir", folder]
    subprocess.run(command, check=True)
    (path,) = Path(folder).rglob("profile_export_aiperf.json")
    profile = json.loads(path.read_text())

assert profile["is_complete"], profile
assert not profile["was_cancelled"], profile
assert profile["error_summary"] == [], profile["error_summary"]
assert profile["request_count"]["avg"] == NUM_REQUESTS, profile["request_count"]
