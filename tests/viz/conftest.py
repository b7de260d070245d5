"""Runs the page's modules in node."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def node():
    """Run the page's modules in node: a list of specifications in, a list of numbers out."""
    if shutil.which("node") is None:
        pytest.skip("there is no node (Debian: apt-get install nodejs); Chromium checks the same")

    def run(specs):
        lines = "\n".join(json.dumps(spec) for spec in specs) + "\n"
        command = ["node", str(HERE / "numbers.mjs")]
        result = subprocess.run(command, input=lines, capture_output=True, text=True, check=True, timeout=60)
        return [json.loads(line) for line in result.stdout.splitlines()]

    return run
