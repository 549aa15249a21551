"""Popular clients, unchanged, on a fleet with the demo model.

    scripts/compatibility [NAME ...] [--folder build/compatibility] [--url URL]

Makes an environment for each client, installs its newest version, and runs its program of
tests/compatibility/clients, which fails by an exception. A client whose tools (node, java, ...) are
missing is skipped. Prints versions and results as a table for docs/api.md; exits with 1 if a client
failed. `--url` uses a fleet that runs already.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.tools.fleet import BenchFleet, FleetConfig
from bench.tools.paths import DEMO_MODEL

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ROOT / "tests" / "compatibility" / "clients"
NODE_SHARED = PROGRAMS / "baton_fleet.mjs"
INSTALL_S, RUN_S = 900, 300
_SHOWN_LINES = 15


@dataclass(frozen=True)
class Client:
    """A client: its packages, the first of which has the version, and the features that its program
    shows. The packages are npm's if the program is one for Node, else PyPI's. Without packages the
    program runs in this environment, with a tool of the system: `version` is the command that
    prints its version. `needs` are commands and folders that it also needs."""

    name: str
    shows: str
    packages: tuple[str, ...] = ()
    version: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    @property
    def is_for_node(self) -> bool:
        """Whether the program is in JavaScript."""
        return (PROGRAMS / f"{self.name}.mjs").exists()

    def missing(self) -> list[str]:
        """The commands and folders that this machine lacks."""
        needs = (*self.needs, *self.version[:1], *(("node", "npm") if self.is_for_node else ()))
        return [each for each in needs if shutil.which(each) is None and not Path(each).is_dir()]


CLIENTS = (
    Client(
        "litellm",
        "library and proxy: chat, stream, tools, `ContextWindowExceededError`, abort",
        ("litellm[proxy]",),
    ),
    Client("langchain", "chat, stream, tools, structured output", ("langchain-openai",)),
    Client("llama_index", "chat, stream", ("llama-index-llms-openai-like",)),
    Client("pydantic_ai", "structured output, tools", ("pydantic-ai-slim[openai]",)),
    Client("instructor", "JSON and tools modes", ("instructor",)),
    Client("openai_agents", "sessions, `previous_response_id`, tools, stream", ("openai-agents",)),
    Client("anthropic", "messages, stream, tools, counting, too long", ("anthropic",)),
    Client(
        "lm_eval",
        "a local task of chats and one of loglikelihoods",
        ("lm-eval[api]", "transformers"),
    ),
    Client("aiperf", "a profile of streamed chats, all counted, none failed", ("aiperf",)),
    Client(
        "java",
        "`HttpClient`, which asks for h2c; HTTP/2 and HTTP/1.1 wishes",
        version=("java", "--version"),
    ),
    Client("coding_agents", "bodies as Claude Code and Codex send them"),
    Client(
        "go",
        "`net/http`: chat, stream, tools, structured output, aborts",
        version=("go", "version"),
    ),
    Client(
        "rust",
        "`ureq` of Debian: chat, stream, tools, structured output, abort",
        version=("dpkg-query", "--show", "librust-ureq-dev"),
        needs=("cargo", "/usr/share/cargo/registry/"),
    ),
    Client(
        "proxies",
        "nginx and haproxy: answers, streams, clients that leave",
        version=("nginx", "-v"),
        needs=("haproxy",),
    ),
    Client("llm", "command line and library: stream, schema, tools, Ctrl-C", ("llm",)),
    Client("smolagents", "stream, structured output, two kinds of agents", ("smolagents[openai]",)),
    Client("haystack", "both APIs: stream, structured output, agent, abort", ("haystack-ai",)),
    Client(
        "inspect_ai",
        "three APIs: evaluations with tools, structured output, abort",
        ("inspect-ai", "openai", "anthropic"),
    ),
    Client("aider", "a question, and an edit of a file", ("aider-chat",)),
    Client("guidellm", "profiles of chats, completions and responses", ("guidellm",)),
    Client("openai_node", "both APIs: stream, tool runner, zod, aborts", ("openai", "zod")),
    Client("anthropic_js", "stream, tool runner, zod, aborts", ("@anthropic-ai/sdk", "zod")),
    Client(
        "ai_sdk",
        "four providers: stream, tools in steps, objects, aborts",
        ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic", "zod"),
    ),
    Client("agents_js", "both APIs: sessions, tools, handoffs, aborts", ("@openai/agents", "zod")),
    Client(
        "langchain_js",
        "both APIs: stream, tools, agent, structured output, aborts",
        ("@langchain/openai", "@langchain/core", "langchain", "zod"),
    ),
    Client("codex", "turns, resumed session, interrupt, too long", ("@openai/codex",)),
    Client(
        "claude_code",
        "turns as events, continued session, interrupt, too long",
        ("@anthropic-ai/claude-code",),
    ),
    Client("opencode", "turns, continued session, interrupt", ("opencode-ai",)),
)


def main(argv: Sequence[str]) -> int:
    """Try the clients; 0 if all of them work."""
    cli = argparse.ArgumentParser(prog="scripts/compatibility", description=__doc__)
    cli.add_argument("names", nargs="*", choices=[[], *(each.name for each in CLIENTS)])
    cli.add_argument("--folder", type=Path, default=ROOT / "build" / "compatibility")
    cli.add_argument("--url")
    arguments = cli.parse_args(argv)
    chosen = [each for each in CLIENTS if not arguments.names or each.name in arguments.names]
    rows, has_failed = [], False
    with _fleet(arguments.url) as url:
        for client in chosen:
            if missing := client.missing():
                print(f"{client.name}: skipped, this machine has no {' and no '.join(missing)}")
                continue
            started = time.monotonic()
            version, trouble = _try(client, arguments.folder / client.name, url)
            has_failed |= bool(trouble)
            result = "works" if not trouble else "fails"
            rows.append(f"| {client.name} | {version} | {client.shows} | {result} |")
            took_s = time.monotonic() - started
            print(f"{client.name} {version}: {result}, {took_s:.0f} s", flush=True)
            if trouble:
                print(trouble)
    print("\n| client | version | shown | result |\n|---|---|---|---|", *rows, sep="\n")
    return int(has_failed)


@contextlib.contextmanager
def _fleet(url: str | None) -> Iterator[str]:
    if url is not None:
        yield url
        return
    flags = ("--device=cpu", "--torch-threads=1")
    router_flags = ("--responses-store",)
    with BenchFleet(
        FleetConfig(str(DEMO_MODEL), 1, 1, 1, worker_flags=flags, router_flags=router_flags)
    ) as fleet:
        yield f"http://127.0.0.1:{fleet.port('router-1')}"


def _try(client: Client, home: Path, url: str) -> tuple[str, str]:
    """The client's version, and the end of what it printed if it failed."""
    shutil.rmtree(home, ignore_errors=True)
    if client.is_for_node:
        return _try_from_npm(client, home, url)
    python, version = Path(sys.executable), "-"
    if client.packages:
        venv.create(home, with_pip=True)
        python = home / "bin" / "python"
        if trouble := _run(
            [str(python), "-m", "pip", "install", "--quiet", *client.packages], INSTALL_S
        ):
            return version, trouble
        package = client.packages[0].partition("[")[0]
        asked = f"import importlib.metadata as m; print(m.version({package!r}))"
        version = subprocess.check_output([str(python), "-c", asked], text=True).strip()
    elif client.version:
        version = _version_of(client.version)
    return version, _run([str(python), str(PROGRAMS / f"{client.name}.py")], RUN_S, url)


def _try_from_npm(client: Client, home: Path, url: str) -> tuple[str, str]:
    """Like `_try`, for a program for Node, which finds packages only beside itself."""
    home.mkdir(parents=True)
    (home / "package.json").write_text("{}")
    if trouble := _run(
        ["npm", "install", "--no-audit", "--no-fund", *client.packages], INSTALL_S, cwd=home
    ):
        return "-", trouble
    package = json.loads((home / "node_modules" / client.packages[0] / "package.json").read_text())
    for program in (NODE_SHARED, PROGRAMS / f"{client.name}.mjs"):
        shutil.copy(program, home)
    return package["version"], _run(["node", f"{client.name}.mjs"], RUN_S, url, home)


def _version_of(command: Sequence[str]) -> str:
    """The first number with points that a command prints."""
    shown = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
    )
    found = re.search(r"\d+(\.\d+)+", shown.stdout)
    return found.group() if found else "-"


def _run(command: list[str], seconds: float, url: str = "", cwd: Path = ROOT) -> str:
    """The end of what a command printed if it failed, else nothing. Programs find the commands of
    their packages first."""
    own = {"BATON_TEST_URL": url, "OPENAI_API_KEY": "none", "ANTHROPIC_API_KEY": "none"}
    bin_folders = [str(Path(command[0]).parent), str(cwd / "node_modules" / ".bin")]
    path = os.pathsep.join([*bin_folders, os.environ["PATH"]])
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env={**os.environ, **own, "PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"not done after {seconds:.0f} s"
    if done.returncode == 0:
        return ""
    return "\n".join(done.stdout.splitlines()[-_SHOWN_LINES:]) or f"exit {done.returncode}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
