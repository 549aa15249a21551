# Sourced by the other scripts: `prepare [EXTRA]` makes .venv and installs Baton into it, with an
# extra of pyproject.toml if one is named. A second run finds nothing to do and is quick.
# TORCH_SPEC names another torch than the tested one; PYTHON another interpreter (3.11 or later).

cd "$(dirname "${BASH_SOURCE[0]}")/.."

prepare() {
    local extra="${1:-}" python wanted stamp
    if [ ! -x .venv/bin/python ]; then
        python="$(find_python)"
        echo "Creating .venv with $("$python" --version)" >&2
        "$python" -m venv .venv
    fi
    stamp=".venv/.installed${extra:+-$extra}"
    wanted="$(cksum <pyproject.toml) ${TORCH_SPEC:-torch==2.13.0}"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        echo "Installing what is missing into .venv (once; a few minutes)" >&2
        .venv/bin/python -m pip install --quiet --upgrade pip
        .venv/bin/python -m pip install --quiet "${TORCH_SPEC:-torch==2.13.0}" numpy
        PYTHONWARNINGS="ignore:Editable installation" \
            .venv/bin/python -m pip install --quiet --editable ".${extra:+[$extra]}"
        echo "$wanted" >"$stamp"
    fi
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
