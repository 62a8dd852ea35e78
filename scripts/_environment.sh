# Sourced with the name of a lock file: installs its packages, once, and sets PROJECT, VENV and PYTHON. `serve` and `dev`
# go into .venv, other people's clients, which do not need specserve, into .venv-NAME. A function `while_compiling` of the
# caller is called as soon as everything but llama.cpp is installed.

PROJECT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
LOCKS="$PROJECT/scripts/locks"
LOG="$PROJECT/.specserve/install.log"
VENV="$PROJECT/.venv"
[[ "$1" == serve || "$1" == dev ]] || VENV="$PROJECT/.venv-$1"
PYTHON="$VENV/bin/python"
unset PYTHONPATH PYTHONHOME
# Without tinyBLAS, llama.cpp's matrix products of a row do not depend on the other rows. Image models and llama.cpp's
# tools are not built.
_BUILD="-DGGML_LLAMAFILE=OFF -DLLAVA_BUILD=OFF -DCMAKE_PROJECT_llama_cpp_INCLUDE=$(printf %q "$PROJECT/scripts/llama_cpp.cmake")"

_fail() {
    echo "specserve: $*" >&2
    exit 1
}

# What an installation depends on; it is repeated when that changes.
_fingerprint() {
    cat "$LOCKS/$1.txt" "$LOCKS/build.txt" "$PROJECT/pyproject.toml" "$PROJECT/scripts/llama_cpp.cmake" "$PROJECT"/handler/kernels/* | sha256sum
    echo "$PROJECT $_BUILD"
}

_is_installed() {
    [[ -x "$PYTHON" && "$(cat "$VENV/.specserve-$1" 2>/dev/null)" == "$(_fingerprint "$1")" ]]
}

_logged() {
    "$@" >>"$LOG" 2>&1 || _fail "the installation failed: $(grep -E '^ *(ERROR|error)|[Ee]rror:' "$LOG" | tail -n 1) (log: .specserve/install.log)."
}

_make_environment() {
    local python
    for python in python3.11 python3.12 python3; do
        if "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] not in {(3, 11), (3, 12)})' 2>/dev/null; then
            _logged "$python" -m venv --clear "$VENV"
            echo "$VENV" >"$VENV/.made"
            return
        fi
    done
    _fail "no Python 3.11 or 3.12 with its venv module is on PATH; install one (Debian, Ubuntu: apt install python3.11-venv)."
}

# Prints the part of lock file $1 that is about llama-cpp-python or, with $2 as "!", the rest.
_of_lock() {
    awk "/^[a-z]/ { ours = /^llama-cpp-python==/ } ${2:-}ours" "$LOCKS/$1.txt"
}

# pip's cache may hold a llama-cpp-python that another project built with other options.
_is_built_as_asked() {
    "$PYTHON" -c 'import sys, llama_cpp
sys.exit(any(part in llama_cpp.llama_print_system_info() for part in (b"LLAMAFILE", b"AMX")))' 2>/dev/null
}

_install() {
    : >"$LOG"
    echo "installing into ${VENV##*/}, once: some minutes (log: .specserve/install.log)"
    rm -f "$VENV"/.specserve-*
    # The programs of an environment hold its path.
    [[ "$(cat "$VENV/.made" 2>/dev/null)" == "$VENV" ]] && "$PYTHON" -c 'import pip' 2>/dev/null || _make_environment
    # The lock names every package; older versions of pip fail when they resolve the dependencies again.
    local pip=("$PYTHON" -m pip --disable-pip-version-check --no-input install --no-deps)
    if [[ "$VENV" != */.venv ]]; then
        _logged "${pip[@]}" --require-hashes -r "$LOCKS/$1.txt"
    else
        command -v "${CXX:-c++}" >/dev/null ||
            _fail "no C++ compiler is on PATH, and llama.cpp is built here; install one (Debian, Ubuntu: apt install g++)."
        export CMAKE_ARGS="${CMAKE_ARGS:-} $_BUILD" PATH="$VENV/bin:$PATH"
        _logged "${pip[@]}" --require-hashes -r "$LOCKS/build.txt"
        # An isolated build would download build tools that no lock names.
        pip+=(--no-build-isolation)
        # Compiled while everything else is downloaded; in a process group of its own, so that all of it can be ended.
        set -m
        _logged "${pip[@]}" --require-hashes -r <(_of_lock "$1") &
        _COMPILER=$!
        set +m
        trap 'kill -- "-$_COMPILER" 2>/dev/null' EXIT
        _logged "${pip[@]}" --require-hashes -r <(_of_lock "$1" !)
        _logged "${pip[@]}" --editable "$PROJECT"
        if [[ "$(type -t while_compiling)" == function ]]; then while_compiling; fi
        echo "compiling llama.cpp and specserve's kernels"
        wait "$_COMPILER"
        trap - EXIT
        _is_built_as_asked || _logged "${pip[@]}" --require-hashes --force-reinstall --no-cache-dir -r <(_of_lock "$1")
        # Always rebuilt: its sources are part of the fingerprint.
        _logged "${pip[@]}" --force-reinstall --no-cache-dir "$PROJECT/handler/kernels"
    fi
    _fingerprint "$1" >"$VENV/.specserve-$1"
}

# dev.txt has all packages of serve.txt.
_is_complete() {
    _is_installed "$1" || { [[ "$1" == serve ]] && _is_installed dev; }
}

if ! _is_complete "$1"; then
    mkdir -p "$PROJECT/.specserve" 2>/dev/null && [[ -w "$PROJECT" && -w "$PROJECT/.specserve" ]] ||
        _fail "$(id -un) may not write into $PROJECT, where this installs; make a clone of your own."
    exec 9>"$PROJECT/.specserve/install.lock"
    flock --nonblock 9 || { echo "waiting for another script that is installing" && flock 9; }
    _is_complete "$1" || _install "$1"
    exec 9>&-
fi
