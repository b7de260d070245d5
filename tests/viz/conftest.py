"""Runs the page's modules in node and in Chromium."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from drawing_page import document

from dualpipe_lab.viz import bundle

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def node():
    """Run the page's modules in node: a list of specifications in, a list of numbers out."""
    if shutil.which("node") is None:
        pytest.skip("there is no node (Debian: apt-get install nodejs); Chromium checks the same")

    def run(specs, script):
        lines = "\n".join(json.dumps(spec) for spec in specs) + "\n"
        command = ["node", str(HERE / script)]
        result = subprocess.run(command, input=lines, capture_output=True, text=True, check=True, timeout=120)
        return [json.loads(line) for line in result.stdout.splitlines()]

    return run


@pytest.fixture
def modules(page):
    """A page with some of the modules, without elements: their functions are its own."""

    def load(*names):
        texts = {}
        for name in names:
            bundle._collect(f"{name}.mjs", texts, ())
        return page.show(f"<script>{''.join(map(bundle._plain, texts.values()))}</script>")

    return load


@pytest.fixture
def page(browser, tmp_path):
    """A page that fails the test if it complains or asks for anything from outside."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, offline=True)
    page = context.new_page()
    complaints = []
    page.on(
        "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "request",
        lambda request: (
            complaints.append(request.url)
            if "://" in request.url and not request.url.startswith(("file://", "data:", "blob:"))
            else None
        ),
    )

    def show(body, theme="light"):
        (tmp_path / "page.html").write_text(document(body, theme), encoding="utf-8")
        page.goto((tmp_path / "page.html").as_uri())
        return page

    page.show = show
    yield page
    context.close()
    assert complaints == []
