"""aider: a question and an edit of a file over chat completions, both as streams."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

MODEL = "openai/demo_model"
LIMITS = {"max_input_tokens": 4096, "max_output_tokens": 600, "litellm_provider": "openai"}
SETTINGS = [{"name": MODEL, "edit_format": "whole", "extra_params": {"max_tokens": 600}}]

with tempfile.TemporaryDirectory() as folder:
    metadata, settings = Path(folder) / "metadata.json", Path(folder) / "settings.yml"
    metadata.write_text(json.dumps({MODEL: LIMITS | {"mode": "chat"}}))
    settings.write_text(json.dumps(SETTINGS))
    (Path(folder) / "a.py").write_text("print(1)\n")
    command = ["aider", "--model", MODEL, "--weak-model", MODEL, "--map-tokens", "0", "--no-git"]
    command += ["--openai-api-base", f"{os.environ['BATON_TEST_URL']}/v1", "--yes-always"]
    command += ["--model-metadata-file", str(metadata), "--model-settings-file", str(settings)]
    command += ["--no-show-model-warnings", "--analytics-disable", "--no-check-update"]
    command += ["--no-show-release-notes", "--no-pretty", "--no-suggest-shell-commands"]
    for mode, text in (("ask", "What is a lambda?"), ("whole", "Print 2")):
        command_line = [*command, "--chat-mode", mode, "--message", text, "a.py"]
        done = subprocess.run(
            command_line,
            cwd=folder,
            env={**os.environ, "HOME": folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=True,
        )
        assert "Tokens: " in done.stdout or "hit a token limit" in done.stdout, done.stdout
        assert "Error" not in done.stdout, done.stdout
