"""Pages in Chromium: drawings, and the page's modules by themselves."""

import pytest
from drawing_page import document

from dualpipe_lab.viz import bundle


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
