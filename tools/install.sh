#!/usr/bin/env bash
# Make the environment and install into it: torch by version, then a lock with hashes, then this package by itself.
# Usage: tools/install.sh VENV LOCK [PYTHON]     pip installs the locked uv, and uv the rest; where uv fails, pip does
# GPU=1, GPU=0: torch for NVIDIA GPUs, for the CPU; by default uv looks whether a GPU answers, and takes the CPU build if none does.
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
python=$venv/bin/python
echo "==> installing $torch and $lock into $venv (torch alone is 200 MB or more)"

with_pip() {
  "$python" -m pip install --disable-pip-version-check "$@"
}

with_uv() {
  "$python" -m uv pip install --compile-bytecode --python "$python" "$@"
}

# uv's own choice of torch's build, where torch's index answers within 10 s; macOS has one build alone.
torch_build() {
  local backend=auto
  if [ -n "${TORCH_INDEX_URL:-}" ] || [ "$(uname)" != Linux ] || [ "${GPU:-}" = 1 ]; then return; fi
  if [ "${GPU:-}" = 0 ]; then backend=cpu; fi
  if UV_HTTP_TIMEOUT=10 UV_HTTP_CONNECT_TIMEOUT=10 UV_HTTP_RETRIES=0 timeout 10 \
    "$python" -m uv pip install --python "$python" --quiet --dry-run --no-deps --torch-backend $backend "$torch" 2> /dev/null; then
    echo "--torch-backend=$backend"
  else
    echo "==> torch's own index did not answer within 10 s: torch comes from the default index" >&2
  fi
}

uv_installs() {
  local uv build
  uv=$(mktemp)
  awk '/^[^ ]/ { here = /^uv==/ } here' "$here/../requirements.lock" > "$uv"
  with_pip --quiet --require-hashes --requirement "$uv" || { rm -f "$uv"; return 1; }
  rm -f "$uv"
  eval "$("$python" "$here/pip_settings.py")"
  build=$(torch_build)
  with_uv $build ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$torch" \
    && with_uv --no-deps --require-hashes --requirement "$lock" \
    && "$python" -m uv pip install --python "$python" --no-deps --no-build-isolation --editable "$here/.."
}

# One index each: with two, pip would take any package from whichever offers it.
pip_installs() {
  echo "==> uv could not install them; its message stands above. pip tries now, and takes minutes" >&2
  with_pip ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$torch" \
    && with_pip --no-deps --require-hashes --requirement "$lock" \
    && with_pip --no-deps --no-build-isolation --editable "$here/.."
}

if ! { uv_installs || pip_installs; }; then
  cat >&2 <<'MESSAGE'
error: pip could not install the locked packages; its own message stands above
  remedy: no network, or a proxy between   set HTTPS_PROXY (and PIP_CERT where the proxy has its own certificate)
          no space left on device          the CPU build of torch needs 3 GB instead of 9: GPU=0, and see README.md, "Installing torch"
          no matching distribution         use Python 3.11 to 3.13 on 64-bit Linux or macOS: make book PYTHON=...
          hashes do not match              a file is not the one that was locked: ask its mirror, or use another one
  then run the same command again: what is installed stays.
MESSAGE
  exit 1
fi
