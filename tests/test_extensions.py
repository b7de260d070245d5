"""The book's Sphinx handlers: the buttons, the tables of docstrings, the glossary's links."""

import asyncio
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from scripts import load
from sphinx_book_theme.header_buttons.launch import add_launch_buttons

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("address", "left"), [("https://github.com/ORG/x", 1), ("https://github.com/someone/x", 3)])
def test_buttons_wait_for_the_repository_s_address(address, left):
    buttons = [{"label": name} for name in ("launch-buttons", "source-repository-button", "download-buttons")]
    context = {"header_buttons": buttons}
    app = SimpleNamespace(config=SimpleNamespace(html_theme_options={"repository_url": address}))
    load(ROOT / "_ext" / "dp_book.py").hide_dead_buttons(app, "page", "page.html", context, None)
    assert len(context["header_buttons"]) == left


def test_with_an_address_the_buttons_of_every_page_lead_to_its_notebook():
    """Binder and Colab open what lies in the repository; the cell that installs the course has the same address."""
    install_cell = load(ROOT / "tools" / "install_cell.py")
    options = {"launch_buttons": yaml.safe_load((ROOT / "_config.yml").read_text())["launch_buttons"]}
    names = [page.relative_to(ROOT).with_suffix("").as_posix() for page in install_cell.pages(ROOT)]
    exercises = [name.replace("book/", "exercises/", 1) for name in names]
    names += [name for name in exercises if (ROOT / f"{name}.md").is_file()]
    env = SimpleNamespace(doc2path=lambda name: str(ROOT / f"{name}.md"), metadata=dict.fromkeys(names, "kernelspec"))
    app = SimpleNamespace(config={"html_theme_options": options | {"repository_branch": "dev"}}, env=env)
    repository = {"github_url": "https://github.com", "github_user": "someone", "github_repo": "course"}
    assert len(names) > 100
    for name in names:
        context = repository | {"header_buttons": [], "pagename": name, "sourcename": ""}
        add_launch_buttons(app, name, "page.html", context, None)
        binder, colab = (button["url"] for button in context["header_buttons"][0]["buttons"])
        assert binder == f"https://mybinder.org/v2/gh/someone/course/dev?urlpath=lab/tree/{name}.ipynb"
        assert colab == f"https://colab.research.google.com/github/someone/course/blob/dev/{name}.ipynb"
        assert (ROOT / f"{name}.ipynb").is_file()
        cell = install_cell.code("https://github.com/someone/course", "dev", Path(name).parent.as_posix())
        assert '"--branch=dev", "https://github.com/someone/course"' in cell
        assert f'{{home}}/{Path(name).parent.as_posix()}"' in cell


def test_a_module_s_tables_are_shown_as_they_are():
    keep_layout = load(ROOT / "_ext" / "dp_docstrings.py").keep_layout
    lines = ["What it is.", "", "Chapter: one.", "  a   1", "  b   2", "Source: a paper."]
    keep_layout(None, "module", "m", None, None, lines)
    table = [".. code-block:: text", "", "   a   1", "   b   2", ""]
    assert lines == ["What it is.", "", "", "Chapter: one.", "", *table, "", "Source: a paper."]


@pytest.mark.parametrize(("text", "last"), [("32768\t60999\n", 32_767), ("1024 65535", 19_999), ("", 32_767)])
def test_ports_stay_below_those_that_the_system_gives_where_there_is_room(tmp_path, monkeypatch, text, last):
    kernels = load(ROOT / "_ext" / "dp_kernels.py")
    (tmp_path / "range").write_text(text)
    monkeypatch.setattr(kernels, "RANGE", tmp_path / "range")
    assert kernels.candidates() == range(10_000, last + 1)
    cache = SimpleNamespace(currently_used_ports=set())
    ports = {kernels.find_available_port(cache, "127.0.0.1") for _ in range(20)}
    assert ports == cache.currently_used_ports <= set(kernels.candidates())
    assert len(ports) == 20


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


CONF = """import sys
sys.path.insert(0, {ext!r})
extensions = ["myst_parser", "sphinx.ext.mathjax", "dp_glossary", "dp_sources", "dp_share", "dp_math", "dp_moved"]
myst_enable_extensions, mathjax_path = ["dollarmath"], "mathjax/tex-chtml.js"
html_theme, project = "basic", "The course"
html_baseurl, moved_pages = {base!r}, {moved!r}
"""
PAGES = {
    "index.md": "# Index\n\nA rank.\n\n```{toctree}\nglossary\nbook/dp/page\n```\n",
    "glossary.md": "# Words\n\n```{glossary}\nrank\n  A process.\n\nlocal rank\n  On a node.\n```\n",
    "book/dp/page.md": '# A "b" & c\n\nCode `rank`, [a rank](../../index.md), a drank, then *two Ranks* and a rank; '
    f"a local rank.\n{'Word & ' * 60}\n\nMore: 66 ticks (simulated), 81 (simulated), 2 GB\n"
    "(quoted: a\nreport, page 8), 3 (derived).\n\nThen $a<b$.\n",
}
MOVED = {"old/deep/page": "book/dp/page#part", "book/before": "book/dp/page"}


def build(folder, base, moved):
    """The book of these pages, and how its build ended."""
    source, out = folder / "source", folder / "out"
    for name, text in (PAGES | {"conf.py": CONF.format(ext=str(ROOT / "_ext"), base=base, moved=moved)}).items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    command = [sys.executable, "-m", "sphinx", "-q", "-W", str(source), str(out)]
    return out, subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    out, done = build(tmp_path_factory.mktemp("book"), "https://example.org/course/", MOVED)
    assert done.returncode == 0, done.stderr
    return out


def test_the_first_use_of_a_term_links_to_the_glossary(built):
    links = r'<a class="dp-term reference internal" href="([^"]*)">([^<]*)</a>'
    assert re.findall(links, (built / "book" / "dp" / "page.html").read_text()) == [
        ("../../glossary.html#term-rank", "Ranks"),
        ("../../glossary.html#term-local-rank", "local rank"),
    ]
    assert re.findall(links, (built / "index.html").read_text()) == []


def test_where_a_number_comes_from_is_a_mark_and_a_list_at_the_end(built):
    page = (built / "book" / "dp" / "page.html").read_text()
    mark = r'<span class="dp-mark"><a class="reference internal" href="#(source-\d)" title="([^"]*)">(\w)</a></span>'
    words = ["simulated", "simulated", "quoted: a report, page 8", "derived"]
    assert [found[1] for found in re.findall(mark, page)] == words
    assert [found[::2] for found in re.findall(mark, page)] == [(f"source-{n}", "abc"[n - 1]) for n in (1, 1, 2, 3)]
    assert re.findall(r'<li id="(source-\d)"><p>(.*?)</p>', page) == [
        (f"source-{number}", text) for number, text in enumerate(words[1:], 1)
    ]
    assert "66 ticks<span" in page


def test_a_published_page_has_an_address_a_card_and_a_place_in_the_sitemap(built):
    page = (built / "book" / "dp" / "page.html").read_text()
    tags = dict(re.findall(r'<meta property="og:(\w+)" content="([^"]*)" />', page))
    assert tags["url"] == "https://example.org/course/book/dp/page.html"
    assert tags["image"] == "https://example.org/course/_static/card.png"
    assert tags["title"] == "A “b” &amp; c"
    assert re.fullmatch(r"Code rank, a rank, .* (Word &amp; )+(Word|&amp;)? ?\.\.\.", tags["description"])
    assert (built / "_static" / "card.png").read_bytes().startswith(b"\x89PNG")
    found = re.findall("<loc>https://example.org/course/(.*)</loc>", (built / "sitemap.xml").read_text())
    assert found == ["book/dp/page.html", "glossary.html", "index.html"]


@pytest.mark.parametrize("has_node", [True, False])
def test_formulas_are_set_by_the_build_or_without_node_in_the_browser(tmp_path, monkeypatch, has_node):
    if has_node and shutil.which("node") is None:
        pytest.skip("there is no node (Node.js)")
    if not has_node:
        monkeypatch.setenv("PATH", str(tmp_path))
    out, done = build(tmp_path, "", {})
    assert done.returncode == 0, done.stderr
    page, script = (out / "book" / "dp" / "page.html").read_text(), out / "_static" / "mathjax" / "tex-chtml.js"
    assert ("<mi>a</mi><mo>&lt;</mo><mi>b</mi></math>" in page) is has_node
    assert ("mathjax/math.css" in page) is has_node
    assert (r"\(a&lt;b\)" in page) is script.exists() is ("tex-chtml.js" in page) is not has_node
    if has_node:
        css = (out / "_static" / "mathjax" / "math.css").read_text()
        assert "mjx-c1D44E" in css  # an italic a
        assert "mjx-c2A0C" not in css
        assert css.count("{") == css.count("}")  # the sign } is gone, its rule too
        assert all((out / "_static" / "mathjax" / font).is_file() for font in re.findall(r'url\("([^"]*)"', css))


def test_a_small_font_has_the_icons_in_use(tmp_path):
    weight = load(ROOT / "_ext" / "dp_weight.py")
    fonts = (
        Path(weight.pydata_sphinx_theme.__file__).parent
        / "theme/pydata_sphinx_theme/static/vendor/fontawesome/webfonts"
    )
    face = (
        '@font-face{font-weight:900;src:url(../vendor/fontawesome/webfonts/fa-solid-900.woff2) format("woff2"),url(x)}'
    )
    css = weight.with_icons(face + '.fa-bars:before{content:"\\f0c9"}', fonts)
    assert css.startswith('@font-face{font-weight:900;src:url("data:font/woff;base64,')
    assert css.endswith('format("woff")}.fa-bars:before{content:"\\f0c9"}')
    assert len(css) < 3_000
    assert weight.with_icons(face, fonts) == ""


def test_what_no_page_uses_leaves_and_the_search_gets_words():
    weight = load(ROOT / "_ext" / "dp_weight.py")
    css = "/* a, b.com */.a,.b .c{top:0}@media print{.b{top:1px}}p:not(.b){top:0}"
    assert weight.only_used(css, {"a", "c"}) == ".a{top:0}p:not(.b){top:0}"
    fold = '<a class="reference internal" href="x.html">GPipe</a><details><summary'
    assert weight.named(f"{fold}>") == f'{fold} aria-label="Pages of GPipe">'
    worded = '<button class="btn search-button-field x" title="Search"{}><span>Search</span> <kbd>Ctrl</kbd></button>'
    assert weight.named(worded.format(' aria-label="Search"')) == worded.format("")
    icon = '<button class="btn btn-sm search-button" title="Search" aria-label="Search"><i></i></button>'
    assert weight.named(icon) == icon
    page = """<h1>Glossary</h1><p>Words.</p>
      <dt id="term-rank">rank<a class="headerlink" href="#">#</a></dt>
      <dt id="term-process">process</dt><dd><p>A <em>process</em>.</p></dd>"""
    assert weight.notes_of({"book/appendix/glossary": page, "moved": ""}) == {
        "book/appendix/glossary": ["", "Words."],
        "book/appendix/glossary#term-rank": ["rank", "A process."],
        "book/appendix/glossary#term-process": ["process", "A process."],
    }


def test_a_moved_page_leads_to_its_new_address(built):
    for page, address in {"old/deep/page": "../../book/dp/page.html#part", "book/before": "dp/page.html"}.items():
        text = (built / f"{page}.html").read_text()
        assert f'content="0; url={address}"' in text
        assert f'<a href="{address}">A “b” &amp; c</a>' in text


@pytest.mark.parametrize(
    ("moved", "words"),
    [({"old": "book/nowhere"}, "no page of the book"), ({"book/dp/page": "index"}, "still a page of the book")],
)
def test_a_wrong_line_of_moved_pages_stops_the_build_and_without_an_address_no_page_is_shared(tmp_path, moved, words):
    out, done = build(tmp_path, "", moved)
    assert done.returncode != 0
    assert words in done.stderr
    assert not (out / "sitemap.xml").exists()
    page = out / "book" / "dp" / "page.html"
    assert not page.exists() or "og:" not in page.read_text()
