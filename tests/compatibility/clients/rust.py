"""Rust's ureq, as Debian packages it, compiled and run from its source."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

CRATES = "/usr/share/cargo/registry"
MANIFEST = """\
[package]
name = "baton"
version = "0.0.0"
edition = "2021"

[dependencies]
serde_json = "1"
ureq = { version = "2", default-features = false, features = ["json"] }
"""
SOURCES = f"""\
[source.crates-io]
replace-with = "debian"

[source.debian]
directory = "{CRATES}"
"""

with tempfile.TemporaryDirectory() as folder:
    for name, text in (("Cargo.toml", MANIFEST), (".cargo/config.toml", SOURCES)):
        path = Path(folder) / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    source = Path(folder) / "src" / "main.rs"
    source.parent.mkdir()
    shutil.copy(Path(__file__).with_name("Baton.rs"), source)
    command = ["cargo", "run", "--quiet", "--offline", "--", os.environ["BATON_TEST_URL"]]
    subprocess.run(command, cwd=folder, check=True)
