#!/bin/sh
# Makes sure that the shared libraries of the Mooncake wheel and Python's venv module are there.
# Debian 12 / Ubuntu: installs what is missing with apt-get when run as root; otherwise says what to install.
set -eu

python=${PYTHON:-python3}
missing=

need() { # PACKAGE PYTHON-STATEMENT
    "$python" -c "$2" 2>/dev/null || missing="$missing $1"
}

if ! command -v "$python" >/dev/null; then
    missing="$missing python3 python3-venv"
    python=python3
else
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "moongate needs Python 3.11 or later; $("$python" --version) is too old (set PYTHON=...)" >&2
        exit 1
    }
    need python3-venv 'import ensurepip, venv'
    need libibverbs1 'import ctypes; ctypes.CDLL("libibverbs.so.1")'
    need librdmacm1 'import ctypes; ctypes.CDLL("librdmacm.so.1")'
    need libnuma1 'import ctypes; ctypes.CDLL("libnuma.so.1")'
    need libcurl4 'import ctypes; ctypes.CDLL("libcurl.so.4")'
fi
[ -n "$missing" ] || exit 0
case $missing in *python3*) missing="$missing libibverbs1 librdmacm1 libnuma1 libcurl4" ;; esac

if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "missing system packages:$missing" >&2
    echo "install them first, for example: sudo apt-get install$missing" >&2
    exit 1
fi
echo "installing system packages:$missing"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086  # one word per package
apt-get install -qq -y --no-install-recommends $missing
