# Sourced by the other scripts: `prepare [EXTRA]` makes .venv and installs Baton into it, with an
# extra of pyproject.toml if one is named, in the versions of constraints.txt. A second run finds
# nothing to do and is quick.
# TORCH_SPEC names another torch than the tested one; PYTHON another interpreter (3.11 or later);
# VENV another folder than .venv; CONSTRAINTS another file (empty: the newest versions).

cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV="${VENV:-.venv}"
CONSTRAINTS="${CONSTRAINTS-constraints.txt}"

prepare() {
    local extra="${1:-}" python wanted stamp started=$SECONDS
    if [ ! -x "$VENV/bin/python" ]; then
        python="$(find_python)"
        echo "Creating $VENV with $("$python" --version)" >&2
        "$python" -m venv "$VENV"
    fi
    stamp="$VENV/.installed${extra:+-$extra}"
    wanted="$(cat pyproject.toml ${CONSTRAINTS:+"$CONSTRAINTS"} | cksum) ${TORCH_SPEC:-}"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        echo "Installing what is missing into $VENV (once; a few minutes)" >&2
        install_packages "$extra"
        echo "$wanted" >"$stamp"
        echo "Installed in $((SECONDS - started)) s" >&2
    fi
}

install_packages() {
    local extra="$1" versions
    versions="$(mktemp)"
    if [ -n "$CONSTRAINTS" ]; then
        # Another torch than the tested one is not held to its version.
        grep -v ${TORCH_SPEC:+-e '^torch=='} -e '^#' "$CONSTRAINTS" >"$versions"
    fi
    "$VENV/bin/python" -m pip install --quiet --upgrade --constraint "$versions" pip
    "$VENV/bin/python" -m pip install --quiet --constraint "$versions" \
        "${TORCH_SPEC:-$(tested_torch)}" numpy
    PYTHONWARNINGS="ignore:Editable installation" \
        "$VENV/bin/python" -m pip install --quiet --constraint "$versions" \
        --editable ".${extra:+[$extra]}"
    rm -f "$versions"
}

# An unpinned torch would be a CUDA build of several gigabytes.
tested_torch() {
    grep '^torch==' constraints.txt
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.12 python3.11 python3.13}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "Baton needs Python 3.11 or later: install it, or name it with PYTHON=..." >&2
    return 1
}
