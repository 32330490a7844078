#!/bin/sh
# Makes sure that uv is there and prints its path. Needs Python 3.11 or later; where its venv
# module is missing (plain Debian), root and apt-get.
set -eu

python=${PYTHON:-python3}
home=${XDG_CACHE_HOME:-$HOME/.cache}/specserve/uv

if command -v uv >/dev/null 2>&1; then
    command -v uv
    exit 0
fi
if [ ! -x "$home/bin/uv" ]; then
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "setup: $python is not Python 3.11 or later; set PYTHON to one that is" >&2
        exit 1
    fi
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        if [ "$(id -u)" != 0 ]; then
            echo "setup: install uv, or as root: apt-get install python3-venv" >&2
            exit 1
        fi
        echo "setup: installing python3-venv" >&2
        { apt-get update -qq && apt-get install -qq -y --no-install-recommends python3-venv; } >&2
    fi
    echo "setup: installing uv into $home" >&2
    rm -rf "$home"
    "$python" -m venv "$home" >&2
    "$home/bin/pip" install --quiet --disable-pip-version-check 'uv>=0.9,<1' >&2
fi
echo "$home/bin/uv"
