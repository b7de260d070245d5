"""Pages with drawings for the browser tests."""

import pytest


def document(body, theme="light"):
    style = "<style>html[data-theme=dark]{background:#14181e;color:#ced6dd}</style>"
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>t</title>{style}'
    html = f'<!doctype html><html lang="en" data-theme="{theme}">'
    return f"{html}<head>{head}</head><body><main><h1>Page</h1>{body}</main></body></html>"


def check_accessibility(page):
    """axe finds nothing serious on the page."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    beyond = {"label-content-name-mismatch": {"enabled": True}}
    found = axe.Axe().run(page, options={"rules": beyond}).response["violations"]
    assert [v for v in found if v["impact"] in ("serious", "critical")] == []


def element(page, expression, tag="dp-timeline"):
    """The value of a JavaScript expression, in which e is the page's first drawing."""
    return page.evaluate(f"() => {{ const e = document.querySelector('{tag}'); return {expression}; }}")
