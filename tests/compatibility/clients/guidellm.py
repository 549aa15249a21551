"""guidellm: short profiles of chats, completions and responses, all of which are answered."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

URL = os.environ["BATON_TEST_URL"]
TOKENIZER = Path(__file__).resolve().parents[3] / "demo_model"
NUM_REQUESTS = 6


def run(request_format: str) -> None:
    """One profile; raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = ["guidellm", "run", "--disable-console"]
        command += [
            "--backend",
            f"kind=openai_http,target={URL},model=demo_model,request_format={request_format}",
            "--profile=kind=concurrent,streams=[2]",
            f"--constraint=kind=max_requests,count={NUM_REQUESTS}",
            f"--tokenizer=kind=huggingface_auto,model={TOKENIZER}",
            "--data=kind=synthetic_text,prompt_tokens=64,output_tokens=16",
            f"--output=kind=json,path={path}",
        ]
        subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        report = json.loads(path.read_text())
    requests = report["benchmarks"][0]["requests"]
    assert len(requests["successful"]) >= NUM_REQUESTS, requests
    assert not requests["errored"], requests["errored"]
    assert all(each["output_metrics"]["text_tokens"] == 16 for each in requests["successful"])


for request_format in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
    run(request_format)
