"""The book as one PDF: pages in order, contents whose numbers are true, and links that stay inside."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from pypdf import PdfReader
from scripts import load

ROOT = Path(__file__).parents[1]
# A process of its own: the tests' browser is another one, and playwright drives one per process.
PRINT = """import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import pdf
pdf.print_book({found!r}, Path(sys.argv[2]), Path(sys.argv[3]))
"""

PAGE = """<html><head><title>T</title><style>h1 {{ color: #123 }}</style></head><body><nav>Menu</nav><article>
<section id="top"><h1>{title}<a class="headerlink" href="#top">#</a></h1>{body}</section><button>Copy</button>
</article></body></html>"""
FOUND = [("index", 0, ""), ("book/a/one", 0, "Part A"), ("exercises/a/one", 1, ""), ("book/a/two", 0, "")]
BODIES = {
    "index": '<p>Read <a href="book/a/two.html#far">two</a>, <a href="book/a/one.html">one</a>.</p>',
    "book/a/one": "<p>Long.</p>" * 120 + '<details class="hide"><p>Folded</p></details>',
    "exercises/a/one": '<p><a href="../../_sources/x.md">source</a> <a href="https://arxiv.org/abs/1">paper</a></p>',
    "book/a/two": '<p>Long.</p><h2 id="far">Far &amp; near</h2><div class="toggle admonition"><p>Answer</p></div>'
    '<details class="dp-ours"><summary>Ours</summary><pre>x = 1</pre></details>'
    '<svg aria-labelledby="t"><title id="t">Chart</title><defs><clipPath id="c"></clipPath><path id="m"></path></defs>'
    '<use xlink:href="#m" fill="#fffaaa" clip-path="url(#c)"></use></svg>',
}


@pytest.fixture
def built(tmp_path):
    for page, body in BODIES.items():
        file = tmp_path / "html" / f"{page}.html"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(PAGE.format(title=page.upper(), body=body))
    return tmp_path / "html"


def test_pages_become_one_document_without_controls(built):
    pdf = load(ROOT / "tools" / "pdf.py")
    text, titles = pdf.document(FOUND, built)
    assert titles == {page: page.upper() for page in BODIES}
    places = [text.index(f'id="{pdf.anchor_of(page)}"') for page in BODIES]
    assert places == sorted(places)
    assert 'href="#book-a-two--far"' in text
    assert 'href="#book-a-one"' in text
    assert 'href="https://arxiv.org/abs/1"' in text
    for word in ("Menu", "Copy", "Folded", "headerlink", "_sources"):
        assert word not in text
    assert "Answer" in text
    assert '<details class="dp-ours" open="">' in text
    for reference in ('aria-labelledby="{}t"', 'xlink:href="#{}m"', 'clip-path="url(#{}c)"', 'fill="#fffaaa"'):
        assert reference.format("book-a-two--") in text


@pytest.mark.browser
def test_the_contents_name_the_pages_on_which_the_chapters_begin(built, tmp_path, browser):
    target = tmp_path / "book.pdf"
    command = [sys.executable, "-c", PRINT.format(found=FOUND), str(ROOT / "tools"), str(target), str(built)]
    subprocess.run(command, check=True)
    reader = PdfReader(target)
    texts = [page.extract_text() for page in reader.pages]
    assert len(texts) >= 6
    contents = next(text for text in texts if "Contents" in text)
    assert "Part A" in contents
    numbers = load(ROOT / "tools" / "pdf.py").page_numbers(target)
    named = dict(re.findall(r"(INDEX|BOOK/A/ONE|EXERCISES/A/ONE|BOOK/A/TWO)\s*(\d+)", contents))
    assert len(named) == len(FOUND)
    for page, number in named.items():
        assert page in texts[int(number) - 1]
        assert numbers[page.lower().replace("/", "-")] == int(number)
    assert next(entry["/Title"] for entry in reader.outline if isinstance(entry, dict)) == "INDEX"
    assert b"file:" not in target.read_bytes()


def test_a_book_that_is_not_built_is_said(tmp_path, monkeypatch):
    pdf = load(ROOT / "tools" / "pdf.py")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "_toc.yml").write_text("root: index.md\nparts: []\n")
    with pytest.raises(SystemExit, match="1 pages are not built, the first is index\n  remedy: make book"):
        pdf.main()
