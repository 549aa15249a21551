#!/usr/bin/env bash
# Collects what bench.gpu needs beside torch, triton, transformers and nvcc, for a machine without
# a network: scripts/gpu_wheels.sh FOLDER. There: python -m pip install --no-index --no-deps FOLDER/*.whl
set -euo pipefail
folder=${1:?usage: scripts/gpu_wheels.sh FOLDER}
python=${PYTHON:-python3}
platforms=()
for minor in 39 35 34 31 28 27 24 17; do platforms+=(--platform "manylinux_2_${minor}_x86_64"); done
"$python" -m pip download --quiet --no-deps --only-binary=:all: --dest "$folder" \
    --python-version 3.12 --implementation cp "${platforms[@]}" --platform manylinux2014_x86_64 \
    flashinfer-python==0.6.13 apache-tvm-ffi nvidia-ml-py msgspec llguidance
kib=$(du -sk "$folder" | cut -f1)
echo "$((kib / 1024)) MiB in $folder"
[ "$kib" -le 65536 ] || { echo "more than 64 MiB" >&2; exit 1; }
