#!/usr/bin/env bash
# Make the environment and install one locked requirements file into it.
# Usage: tools/install.sh VENV REQUIREMENTS [PYTHON]
set -euo pipefail

venv=$1
requirements=$2
here=$(dirname "$0")

if [ ! -x "$venv/bin/python" ]; then
  python=$("$here/prerequisites.sh" "${3:-}" "$venv")
  echo "==> making $venv with $("$python" --version)"
  "$python" -m venv "$venv"
fi
echo "==> installing $requirements into $venv (the first time takes minutes: torch alone is 200 MB or more)"
if ! "$venv/bin/python" -m pip install --disable-pip-version-check -r "$requirements"; then
  cat >&2 <<'MESSAGE'
error: pip could not install the locked packages; its own message stands above
  remedy: no network, or a proxy between   set HTTPS_PROXY (and PIP_CERT where the proxy has its own certificate)
          no space left on device          the CPU build of torch needs 3 GB instead of 9: see README.md, "Installing torch"
          no matching distribution         use Python 3.11 to 3.13 on 64-bit Linux or macOS: make book PYTHON=...
  then run the same command again: what is installed stays.
MESSAGE
  exit 1
fi
