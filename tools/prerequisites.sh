#!/usr/bin/env bash
# Name what is missing before anything is installed, each with its remedy; print the Python to use on stdout.
# Usage: tools/prerequisites.sh [PYTHON] [VENV]     PYTHON empty: the first of python3.11 ... python3 that will do
set -euo pipefail

python=${1:-}
venv=${2:-.venv}
needed_mib=3072

fail() {
  printf 'error: %s\n  remedy: %s\n' "$1" "$2" >&2
  exit 1
}

runs() { command -v "$1" >/dev/null 2>&1 && "$1" -c '' >/dev/null 2>&1; }
new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

if [ -z "$python" ]; then
  for candidate in python3.11 python3.12 python3.13 python3; do
    if runs "$candidate" && new_enough "$candidate"; then python=$candidate; break; fi
  done
  [ -n "$python" ] || fail "no Python 3.11 or newer was found" \
    "install it (Debian, Ubuntu: apt-get install python3.11 python3.11-venv; macOS: brew install python@3.11) or name it: make book PYTHON=/path/to/python3.11"
fi
runs "$python" || fail "$python cannot be run" "name a Python that exists: make book PYTHON=/path/to/python3.11"
new_enough "$python" || fail "$python is $("$python" --version 2>&1), and Python 3.11 or newer is needed" \
  "name a newer one: make book PYTHON=/path/to/python3.11"
"$python" -c 'import venv, ensurepip' >/dev/null 2>&1 || fail "$python has no venv or ensurepip module" \
  "install it (Debian, Ubuntu: apt-get install python3-venv, or python3.12-venv for that version)"
command -v git >/dev/null 2>&1 || fail "git was not found" "install it (Debian, Ubuntu: apt-get install git; macOS: xcode-select --install)"

if [ ! -d "$venv" ]; then
  free_mib=$(df -Pm . | awk 'NR == 2 { print $4 }')
  [ "$free_mib" -ge "${DUALPIPE_LAB_NEEDED_MIB:-$needed_mib}" ] || fail \
    "the disk has $free_mib MiB free, and the environment needs ${DUALPIPE_LAB_NEEDED_MIB:-$needed_mib} MiB" \
    "free some space, or put the environment elsewhere: make book VENV=/bigger/disk/venv"
fi
printf '%s\n' "$python"
