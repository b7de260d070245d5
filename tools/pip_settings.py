"""Print pip's own settings (mirrors, certificates, wheels on a disk) as the variables that say the same to uv.

uv does not read pip's configuration.  A variable of uv's that is set already wins.
Usage: eval "$(VENV/bin/python tools/pip_settings.py)"
"""

import ast
import os
import re
import shlex
import subprocess
import sys

NAMES = {  # pip's option: uv's variable, what stands between several values
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "no-index": ("UV_NO_INDEX", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "proxy": ("HTTPS_PROXY", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
}


def settings(listed: str) -> dict[str, str]:
    """Translate what `pip config list` prints; a variable of pip's beats its files."""
    found: dict[str, str] = {}
    for section in ("global", "install", ":env:"):
        for option, value in re.findall(rf"^{section}\.(\S+)=(.*)$", listed, re.MULTILINE):
            if option in NAMES:
                name, between = NAMES[option]
                found[name] = between.join(each for each in str(ast.literal_eval(value)).split() if exists(each))
    if "UV_INDEX" in found:
        found["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # pip takes a package from whichever index has the best one
    return {name: value for name, value in found.items() if value and name not in os.environ}


def exists(place: str) -> bool:
    """Tell whether a folder that is used as an index is there: pip passes over one that is not, and uv stops."""
    return not place.startswith("file://") or os.path.isdir(place.removeprefix("file://"))


if __name__ == "__main__":
    pip = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(pip, capture_output=True, text=True, check=False).stdout
    print("\n".join(f"export {name}={shlex.quote(value)}" for name, value in settings(listed).items()))
