#!/usr/bin/env bash
# Make the environment and install one locked requirements file into it.
# Usage: tools/install.sh VENV REQUIREMENTS [PYTHON]
# TORCH_INDEX_URL: an index for torch, and for torch alone: every other package comes from pip's own index.
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
install() {
  "$venv/bin/python" -m pip install --disable-pip-version-check "$@"
}

torch() { # with two indexes pip would take any package from whichever offers it; pinned, this one is not replaced below
  local pinned
  pinned=$(grep -m 1 '^torch==' "$requirements") || return 0
  [ -z "${TORCH_INDEX_URL:-}" ] || install --index-url "$TORCH_INDEX_URL" --no-deps "$pinned"
}

if ! { torch && install -r "$requirements"; }; then
  cat >&2 <<'MESSAGE'
error: pip could not install the locked packages; its own message stands above
  remedy: no network, or a proxy between   set HTTPS_PROXY (and PIP_CERT where the proxy has its own certificate)
          no space left on device          the CPU build of torch needs 3 GB instead of 9: see README.md, "Installing torch"
          no matching distribution         use Python 3.11 to 3.13 on 64-bit Linux or macOS: make book PYTHON=...
  then run the same command again: what is installed stays.
MESSAGE
  exit 1
fi
