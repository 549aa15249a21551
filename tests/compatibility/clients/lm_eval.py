"""lm-eval: a local task by chats, and one by loglikelihoods of completions."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

URL = os.environ["BATON_TEST_URL"]
MODEL = Path(__file__).resolve().parents[3] / "demo_model"
GENERATE = """\
task: baton_generate
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 16}}
metric_list: [{{metric: exact_match}}]
"""
CHOOSE = """\
task: baton_choose
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["yes", "no"]
doc_to_target: 0
metric_list: [{{metric: acc}}]
"""


def run(folder: str, kind: str, task: str, path: str, *more: str) -> None:
    """One evaluation; raises CalledProcessError."""
    arguments = f"model=demo_model,base_url={URL}{path},num_concurrent=2,max_retries=1"
    if kind == "local-completions":
        arguments += f",tokenizer={MODEL},tokenizer_backend=huggingface"
    command = ["lm_eval", "--model", kind, "--model_args", arguments, "--tasks", task]
    command += ["--include_path", folder, "--output_path", folder, *more]
    subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})


with tempfile.TemporaryDirectory() as folder:
    data = Path(folder) / "data.jsonl"
    rows = [{"question": f"What is {each}?", "answer": each} for each in ("a list", "a lambda")]
    data.write_text("\n".join(map(json.dumps, rows)))
    for name, text in (("generate", GENERATE), ("choose", CHOOSE)):
        (Path(folder) / f"{name}.yaml").write_text(text.format(data=data))
    run(
        folder,
        "local-chat-completions",
        "baton_generate",
        "/v1/chat/completions",
        "--apply_chat_template",
    )
    run(folder, "local-completions", "baton_choose", "/v1/completions")
sys.exit(0)
