#!/usr/bin/env bash
# Make the environment and install into it: torch by version, then a lock with hashes, then this package by itself.
# Usage: tools/install.sh VENV LOCK [PYTHON]
# TORCH_INDEX_URL: the index of torch and of what only torch brings; every other package comes from pip's own.
# TORCH: another version than the pin in requirements.txt, such as 'torch==2.10.*'.
set -euo pipefail

venv=$1
lock=$2
here=$(dirname "$0")
torch=${TORCH:-$(grep '^torch==' "$here/../requirements.txt")}

if [ ! -x "$venv/bin/python" ]; then
  python=$("$here/prerequisites.sh" "${3:-}" "$venv")
  echo "==> making $venv with $("$python" --version)"
  "$python" -m venv "$venv"
fi
echo "==> installing $torch and $lock into $venv (the first time takes minutes: torch alone is 200 MB or more)"
install() {
  "$venv/bin/python" -m pip install --disable-pip-version-check "$@"
}

# One index each: with two, pip would take any package from whichever offers it.
if ! { install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$torch" \
  && install --require-hashes --requirement "$lock" \
  && install --no-deps --no-build-isolation --editable "$here/.."; }; then
  cat >&2 <<'MESSAGE'
error: pip could not install the locked packages; its own message stands above
  remedy: no network, or a proxy between   set HTTPS_PROXY (and PIP_CERT where the proxy has its own certificate)
          no space left on device          the CPU build of torch needs 3 GB instead of 9: see README.md, "Installing torch"
          no matching distribution         use Python 3.11 to 3.13 on 64-bit Linux or macOS: make book PYTHON=...
          hashes do not match              a file is not the one that was locked: ask its mirror, or use another one
  then run the same command again: what is installed stays.
MESSAGE
  exit 1
fi
