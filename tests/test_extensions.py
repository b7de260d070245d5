"""The book's Sphinx handlers: the buttons, the tables of docstrings, the glossary's links."""

import asyncio
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from scripts import load

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("address", "left"), [("https://github.com/ORG/x", 1), ("https://github.com/someone/x", 3)])
def test_buttons_wait_for_the_repository_s_address(address, left):
    buttons = [{"label": name} for name in ("launch-buttons", "source-repository-button", "download-buttons")]
    context = {"header_buttons": buttons}
    app = SimpleNamespace(config=SimpleNamespace(html_theme_options={"repository_url": address}))
    load(ROOT / "_ext" / "dp_book.py").hide_dead_buttons(app, "page", "page.html", context, None)
    assert len(context["header_buttons"]) == left


def test_a_module_s_tables_are_shown_as_they_are():
    keep_layout = load(ROOT / "_ext" / "dp_docstrings.py").keep_layout
    lines = ["What it is.", "", "Chapter: one.", "  a   1", "  b   2", "Source: a paper."]
    keep_layout(None, "module", "m", None, None, lines)
    table = [".. code-block:: text", "", "   a   1", "   b   2", ""]
    assert lines == ["What it is.", "", "", "Chapter: one.", "", *table, "", "Source: a paper."]


def test_kernels_get_free_ports_that_nobody_is_given_by_chance():
    kernels = load(ROOT / "_ext" / "dp_kernels.py")
    cache = SimpleNamespace(currently_used_ports=set())
    ports = [kernels.find_available_port(cache, "127.0.0.1") for _ in range(50)]
    assert len(set(ports)) == 50
    assert cache.currently_used_ports == set(ports)
    assert all(port in kernels.candidates() for port in ports)
    for port in ports[:5]:
        with socket.socket() as one:
            one.bind(("127.0.0.1", port))
    with pytest.raises(OSError, match=r"assign|address"):
        kernels.find_available_port(cache, "192.0.2.1")  # an address that no machine has


@pytest.mark.parametrize(("text", "last"), [("32768\t60999\n", 32_767), ("1024 65535", 19_999), ("", 32_767)])
def test_ports_stay_below_those_that_the_system_gives_where_there_is_room(tmp_path, monkeypatch, text, last):
    kernels = load(ROOT / "_ext" / "dp_kernels.py")
    (tmp_path / "range").write_text(text)
    monkeypatch.setattr(kernels, "RANGE", tmp_path / "range")
    assert kernels.candidates() == range(10_000, last + 1)


def run(coroutine):
    """Run it in a thread of its own: in this one, a browser that an earlier test opened has a running loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


def test_a_page_gets_another_kernel_if_its_first_does_not_start_and_no_second_chance(monkeypatch):
    kernels, tried = load(ROOT / "_ext" / "dp_kernels.py"), []

    async def fails(client, reset_kc, **options):
        tried.append(client.km)
        if len(tried) < 2 or client.says == "a cell":
            raise RuntimeError(client.says)
        return "page"

    monkeypatch.setattr(kernels, "_execute", fails)
    dead = SimpleNamespace(km="dead", says="Kernel didn't respond in 60 seconds")
    assert run(kernels.execute(dead)) == "page"
    assert tried == ["dead", None]
    with pytest.raises(RuntimeError, match="a cell"):
        run(kernels.execute(SimpleNamespace(km="alive", says="a cell")))
    assert tried == ["dead", None, "alive"]


GLOSSARY_CONF = """import sys
sys.path.insert(0, {ext!r})
extensions, html_theme, project = ["myst_parser", "dp_glossary"], "basic", "p"
"""


def test_the_first_use_of_a_term_links_to_the_glossary(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    (source / "book" / "dp").mkdir(parents=True)
    (source / "conf.py").write_text(GLOSSARY_CONF.format(ext=str(ROOT / "_ext")))
    (source / "index.md").write_text("# Index\n\nA rank.\n\n```{toctree}\nglossary\nbook/dp/page\n```\n")
    (source / "glossary.md").write_text(
        "# Words\n\n```{glossary}\nrank\n  A process.\n\nlocal rank\n  On a node.\n```\n"
    )
    text = "# Ranks\n\nCode `rank`, [a rank](../../index.md), a drank, then *two Ranks* and a rank; a local rank.\n"
    (source / "book" / "dp" / "page.md").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", str(source), str(out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    links = r'<a class="dp-term reference internal" href="([^"]*)">([^<]*)</a>'
    page = (out / "book" / "dp" / "page.html").read_text()
    assert re.findall(links, page) == [
        ("../../glossary.html#term-rank", "Ranks"),
        ("../../glossary.html#term-local-rank", "local rank"),
    ]
    assert re.findall(links, (out / "index.html").read_text()) == []


SHARE_CONF = """import sys
sys.path.insert(0, {ext!r})
extensions, html_theme, project, html_baseurl = ["myst_parser", "dp_share"], "basic", "The course", {base!r}
"""


@pytest.mark.parametrize("base", ["", "https://example.org/course/"])
def test_a_published_page_has_an_address_a_card_and_a_place_in_the_sitemap(tmp_path, base):
    source, out = tmp_path / "source", tmp_path / "out"
    (source / "book").mkdir(parents=True)
    (source / "conf.py").write_text(SHARE_CONF.format(ext=str(ROOT / "_ext"), base=base))
    (source / "index.md").write_text("# Index\n\n```{toctree}\nbook/page\n```\n")
    (source / "book" / "page.md").write_text(f'# A "b" & c\n\n{"Word & " * 60}\n\nMore.\n')
    command = [sys.executable, "-m", "sphinx", "-q", "-W", str(source), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tags = dict(re.findall(r'<meta property="og:(\w+)" content="([^"]*)" />', (out / "book" / "page.html").read_text()))
    if not base:
        assert not tags
        assert not (out / "sitemap.xml").exists()
        return
    assert tags["url"] == "https://example.org/course/book/page.html"
    assert tags["image"] == "https://example.org/course/_static/card.png"
    assert tags["title"] == "A “b” &amp; c"
    assert re.fullmatch(r"(Word &amp; )+(Word|&amp;)? ?\.\.\.", tags["description"])
    assert (out / "_static" / "card.png").read_bytes().startswith(b"\x89PNG")
    site = (out / "sitemap.xml").read_text()
    assert re.findall("<loc>(.*)</loc>", site) == [f"{base}book/page.html", f"{base}index.html"]


MOVED_CONF = """import sys
sys.path.insert(0, {ext!r})
extensions, html_theme, project, moved_pages = ["myst_parser", "dp_moved"], "basic", "The course", {moved!r}
"""


def build_moved(tmp_path, moved):
    source, out = tmp_path / "source", tmp_path / "out"
    (source / "book").mkdir(parents=True)
    (source / "conf.py").write_text(MOVED_CONF.format(ext=str(ROOT / "_ext"), moved=moved))
    (source / "index.md").write_text("# Index\n\n```{toctree}\nbook/page\n```\n")
    (source / "book" / "page.md").write_text("# A & B\n")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", str(source), str(out)]
    return out, subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_moved_page_leads_to_its_new_address(tmp_path):
    out, done = build_moved(tmp_path, {"old/deep/page": "book/page#part", "book/before": "book/page"})
    assert done.returncode == 0, done.stderr
    pages = {"old/deep/page": "../../book/page.html#part", "book/before": "page.html"}
    for page, address in pages.items():
        text = (out / f"{page}.html").read_text()
        assert f'content="0; url={address}"' in text
        assert f'<a href="{address}">A &amp; B</a>' in text


@pytest.mark.parametrize(
    ("moved", "words"),
    [({"old": "book/nowhere"}, "no page of the book"), ({"book/page": "index"}, "still a page of the book")],
)
def test_a_wrong_line_of_moved_pages_stops_the_build(tmp_path, moved, words):
    _, done = build_moved(tmp_path, moved)
    assert done.returncode != 0
    assert words in done.stderr
