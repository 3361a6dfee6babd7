#!/usr/bin/env bash
# Make or refresh a virtual environment with this project in it.
#
#   tools/make_venv.sh DIRECTORY EXTRAS        for example: tools/make_venv.sh .venv dev
#   tools/make_venv.sh --remove DIRECTORY
#
# Does nothing when DIRECTORY was made from the same pyproject.toml, constraints, extras and
# Python. A directory that this script did not make is never changed. If the Python differs, the old
# environment is moved aside, and moved back if the installation fails. PYTHON chooses the
# interpreter (3.11 to 3.13). TORCH chooses the torch to install, for example
# TORCH='torch==2.13.0 --index-url URL' for an index with a particular CUDA build.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
    echo "usage: tools/make_venv.sh DIRECTORY EXTRAS | tools/make_venv.sh --remove DIRECTORY" >&2
    exit 2
}
[ $# -eq 2 ] && [ -n "$1" ] && [ -n "$2" ] || usage

is_ours() {
    # Environments that were made before there was a mark hold an install.log.
    [ -f "$1/.made-by-lattice" ] || { [ -f "$1/pyvenv.cfg" ] && [ -f "$1/install.log" ]; }
}
is_absent_or_empty() {
    [ ! -e "$1" ] && [ ! -L "$1" ] || { [ -d "$1" ] && [ -z "$(ls -A "$1")" ]; }
}
check_ours() {
    if ! is_absent_or_empty "$1" && ! is_ours "$1"; then
        echo "$1 holds something other than a virtual environment made by tools/make_venv.sh, and" \
            "stays as it is; name another directory, for example VENV=.venv." >&2
        exit 1
    fi
}

if [ "$1" = --remove ]; then
    directory=$(realpath -m -- "$2")
    check_ours "$directory"
    rm -rf -- "$directory"
    exit 0
fi

directory=$(realpath -m -- "$1")
extras=$2
log=$directory/install.log
former=$directory.former

check_ours "$directory"
check_ours "$former"

suitable() { "$1" -c 'import sys; raise SystemExit(not (3, 11) <= sys.version_info < (3, 14))'; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3 python3.12 python3.13 python}; do
        if command -v "$candidate" >/dev/null && suitable "$candidate" 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    echo "No Python 3.11 to 3.13 found${PYTHON:+ (PYTHON=$PYTHON)}; set PYTHON to one." >&2
    return 1
}

python=$(find_python)
key=$(
    { "$python" -VV; echo "$extras ${TORCH:-}"; cat pyproject.toml constraints.txt setup.py megatron/core/datasets/_native.c; } |
        "$python" -c 'import hashlib, sys
print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
)
if [ "$(cat "$directory/.made-from" 2>/dev/null)" = "$key" ]; then
    exit 0
fi

failed() {
    echo "Installing failed; the end of $log:" >&2
    tail -n 20 "$log" >&2
    exit 1
}

restore() {
    [ -d "$former" ] || return 0
    if [ -f "$directory/.made-from" ]; then
        rm -rf -- "$former"
    else
        [ ! -f "$log" ] || mv -- "$log" "$former"
        rm -rf -- "$directory"
        mv -- "$former" "$directory"
        echo "The former environment in $directory is restored." >&2
    fi
}

started=$SECONDS
if [ "$("$directory/bin/python" -VV 2>/dev/null)" != "$("$python" -VV)" ]; then
    # An environment contains its own path, so the new one is made in its final place.
    trap restore EXIT
    if [ -d "$former" ]; then # a run was killed: remove its unfinished environment
        rm -rf -- "$directory"
    elif is_ours "$directory"; then
        mv -- "$directory" "$former"
    fi
    mkdir -p "$directory"
    touch "$directory/.made-by-lattice"
    if ! "$python" -m venv "$directory"; then
        echo "$python cannot make virtual environments; on Debian install python3-venv." >&2
        exit 1
    fi
fi
rm -f "$directory/.made-from"
: >"$log"

# Packages are compiled below on all cores, not one by one while they are unpacked.
pip=("$directory/bin/python" -m pip --disable-pip-version-check --no-input install --no-compile)

echo "Installing torch into $directory ($("$python" -V)) ..."
# shellcheck disable=SC2086  # TORCH may carry pip options
"${pip[@]}" ${TORCH:-torch -c constraints.txt} >>"$log" 2>&1 || failed
echo "Installing megatron-lattice[$extras] ..."
"${pip[@]}" -e ".[$extras]" -c constraints.txt >>"$log" 2>&1 || failed
# Some packages ship templates that are no valid Python; their import does not need them.
"$directory/bin/python" -m compileall -q -j 0 "$directory/lib" megatron >>"$log" 2>&1 || true

echo "$key" >"$directory/.made-from"
echo "Installed in $((SECONDS - started)) s."
