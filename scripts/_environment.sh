# Sourced by the scripts with `serve`, `dev`, or the name of other people's clients: installs the packages of the lock
# file into .venv, or .venv-NAME, and sets PROJECT, VENV and PYTHON. If they are installed already, it takes milliseconds.

PROJECT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$PROJECT/.venv"
# Third-party clients depend on hundreds of other packages, and not on specserve.
_is_ours() {
    [[ "$1" == serve || "$1" == dev ]]
}
_is_ours "$1" || VENV="$PROJECT/.venv-$1"
PYTHON="$VENV/bin/python"
unset PYTHONPATH PYTHONHOME

_fail() {
    echo "specserve: $*" >&2
    exit 1
}

_lock_file() {
    [[ "$1" == serve ]] && echo "$PROJECT/requirements.lock" || echo "$PROJECT/requirements-$1.lock"
}

_BUILD_TOOLS="$PROJECT/requirements-build.lock"
# Without tinyBLAS, llama.cpp's matrix products of a row do not depend on the other rows. Image models and llama.cpp's
# tools are not built.
_BUILD="-DGGML_LLAMAFILE=OFF -DLLAVA_BUILD=OFF -DCMAKE_PROJECT_llama_cpp_INCLUDE=$(printf %q "$PROJECT/scripts/llama_cpp.cmake")"

# The inputs of an installation; it is repeated when they change.
_fingerprint() {
    cat "$(_lock_file "$1")" "$_BUILD_TOOLS" "$PROJECT/pyproject.toml" "$PROJECT/scripts/llama_cpp.cmake" "$PROJECT"/handler/kernels/* | { sha256sum 2>/dev/null || shasum -a 256; }
    echo "$PROJECT $_BUILD"
}

_is_installed() {
    [[ -x "$PYTHON" && "$(cat "$VENV/.specserve-$1" 2>/dev/null)" == "$(_fingerprint "$1")" ]]
}

_is_complete() {
    _is_installed "$1" || { [[ "$1" == serve ]] && _is_installed dev; }
}

_find_python() {
    local candidate
    for candidate in python3.11 python3.12 python3; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] not in {(3, 11), (3, 12)})' \
            2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    _fail "no Python 3.11 or 3.12 with its venv module is on PATH; install one (Debian, Ubuntu: apt install python3.11-venv)."
}

_check_compiler() {
    local compiler
    for compiler in "${CXX:-}" c++ g++ clang++; do
        [[ -n "$compiler" ]] && command -v "$compiler" >/dev/null && break
        compiler=""
    done
    [[ -n "$compiler" ]] ||
        _fail "no C++ compiler is on PATH, and llama.cpp is built here; install one (Debian, Ubuntu: apt install g++; macOS: xcode-select --install)."
}

_check_machine() {
    local gigabytes=3 length="building llama.cpp takes three minutes on two cores" free_kilobytes
    if ! _is_ours "$1"; then
        gigabytes=2 length="up to 230 MB to download"
    else
        "$PYTHON" -c 'import llama_cpp' 2>/dev/null && return
        _check_compiler
    fi
    free_kilobytes="$(df -Pk "$PROJECT" | awk 'NR == 2 { print $4 }')"
    ((free_kilobytes > gigabytes * 1000000)) ||
        _fail "$PROJECT: installing takes $gigabytes GB of disk and $((free_kilobytes / 1000)) MB are free; make room."
    echo "installing into ${VENV##*/}, once; $length (log: .specserve/install.log)"
}

# Runs a command with its output in the log; a terminal shows the elapsed seconds.
_logged() {
    local log="$PROJECT/.specserve/install.log" begun=$SECONDS heartbeat=""
    if [[ -t 2 ]]; then
        # Ends with this script: Ctrl-C does not stop a background process.
        (while sleep 2 && kill -0 $$ 2>/dev/null; do printf '\r  %d s ' "$((SECONDS - begun))" >&2; done) &
        heartbeat=$!
    fi
    local status=0
    "$@" >>"$log" 2>&1 || status=$?
    if [[ -n "$heartbeat" ]]; then
        kill "$heartbeat" 2>/dev/null || true
        wait "$heartbeat" 2>/dev/null || true
        printf '\r        \r' >&2
    fi
    ((status == 0)) || _fail "the installation failed: $(_last_error "$log") (log: .specserve/install.log)."
}

_last_error() {
    local line
    line="$(grep -E '^ *(ERROR|error)|[Ee]rror:' "$1" | tail -n 1)"
    echo "${line:-$(tail -n 1 "$1")}"
}

# pip's cache may contain a build with other options.
_is_built_as_asked() {
    "$PYTHON" -c 'import sys, llama_cpp
sys.exit(any(part in llama_cpp.llama_print_system_info() for part in (b"LLAMAFILE", b"AMX")))' 2>/dev/null
}

_install() {
    local kind="$1" python="$2"
    _check_machine "$kind"
    : >"$PROJECT/.specserve/install.log"
    rm -f "$VENV"/.specserve-*
    # An environment that is not whole, or that lay elsewhere when its programs were written, is made anew.
    if [[ "$(cat "$VENV/.specserve.made" 2>/dev/null)" != "$VENV" ]] || ! "$PYTHON" -c 'import pip' 2>/dev/null; then
        _logged "$python" -m venv --clear "$VENV"
        echo "$VENV" >"$VENV/.specserve.made"
    fi
    export CMAKE_ARGS="${CMAKE_ARGS:-} $_BUILD"
    # The lock names every package; older versions of pip fail when they resolve the dependencies again.
    local pip=("$PYTHON" -m pip --disable-pip-version-check --no-input install --no-deps)
    if _is_ours "$kind"; then
        # An isolated build would download unlocked versions of the build tools.
        _logged "${pip[@]}" --require-hashes -r "$_BUILD_TOOLS"
        export PATH="$VENV/bin:$PATH"
        pip+=(--no-build-isolation)
    fi
    _logged "${pip[@]}" --require-hashes -r "$(_lock_file "$kind")"
    if _is_ours "$kind"; then
        _is_built_as_asked || _logged "${pip[@]}" --require-hashes --force-reinstall --no-cache-dir \
            -r <(awk '/^llama-cpp-python==/ { ours = 1 } ours { print } ours && !/\\$/ { exit }' "$(_lock_file "$kind")")
        # Always rebuilt: its sources are part of the fingerprint.
        _logged "${pip[@]}" --force-reinstall --no-cache-dir "$PROJECT/handler/kernels"
        _logged "${pip[@]}" --editable "$PROJECT"
    fi
    _fingerprint "$kind" >"$VENV/.specserve-$kind"
}

if ! _is_complete "$1"; then
    mkdir -p "$PROJECT/.specserve"
    # One installation at a time; the lock is released when this process ends.
    exec 9>"$PROJECT/.specserve/install.lock"
    _python="$(_find_python)" || exit 1
    "$_python" -c "
import fcntl
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print('waiting for another script that is installing into .venv', flush=True)
    fcntl.flock(9, fcntl.LOCK_EX)
" || exit 1
    _is_complete "$1" || _install "$1" "$_python"
    exec 9>&-
fi
