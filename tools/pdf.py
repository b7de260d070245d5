"""Print the built book as one PDF: contents with page numbers, bookmarks, and links that stay inside of the file.

Usage: pdf.py [FILE]     default _build/dualpipe-lab.pdf; `make book` comes first, and Chromium prints

The built pages become one document.  Chromium prints it twice, because only a printed book knows its page numbers.
Drawings print as their static pictures, answers are open, and folded cells stay out, as on a single printed page.
"""

import os
import re
import shutil
import sys
import tempfile
from html import escape
from pathlib import Path
from urllib.parse import unquote, urljoin

import yaml
from bs4 import BeautifulSoup, Tag
from playwright.sync_api import PdfMargins, sync_playwright
from pypdf import PdfReader

HTML = Path("_build/html")
DEAD_TAGS = {"script", "button", "noscript"}
DEAD_CLASSES = {"headerlink", "toggle-details__summary", "prev-next-footer", "hide"}  # hide: a folded cell
_REFERENCE = re.compile(r"url\(#([^)]+)\)")  # a clip, a marker or a gradient of a drawing
FLAGS = ("--no-sandbox", "--allow-file-access-from-files")
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
FOOTER = '<div style="width: 100%; font-size: 8px; text-align: center"><span class="pageNumber"></span></div>'
MARGINS: PdfMargins = {"top": "16mm", "bottom": "18mm", "left": "16mm", "right": "16mm"}
STYLE = """
  body { font-size: 10.5pt; }
  .book { max-width: 100%; }
  .book > section { break-before: page; }
  .book-contents { columns: 2; font-size: 9pt; break-before: page; }
  .book-contents h2 { font-size: 11pt; margin: 0.6em 0 0.2em; break-after: avoid; }
  .book-contents p { display: flex; justify-content: space-between; margin: 0; break-inside: avoid; }
  .book-contents .below { padding-inline-start: 1.2em; color: #555; }
  .toggle.admonition > * { display: block !important; height: auto !important; opacity: 1 !important; }
"""
Entry = tuple[str, int, str]  # page without suffix, depth, caption of the part that begins with it


def entries(toc: dict[str, object]) -> list[Entry]:
    """Return the book's pages in reading order.

    >>> chapter = {"file": "b.md", "sections": [{"file": "c.md"}]}
    >>> entries({"root": "a.md", "parts": [{"caption": "P", "chapters": [chapter]}]})
    [('a', 0, ''), ('b', 0, 'P'), ('c', 1, '')]
    """
    found: list[Entry] = [(_bare(toc["root"]), 0, "")]
    for part in toc["parts"]:  # type: ignore[attr-defined]
        caption = part["caption"]
        for chapter in part["chapters"]:
            found.append((_bare(chapter["file"]), 0, caption))
            found += [(_bare(section["file"]), 1, "") for section in chapter.get("sections", [])]
            caption = ""
    return found


def _bare(file: object) -> str:
    return str(file).removesuffix(".md")


def anchor_of(page: str, name: str = "") -> str:
    """Return the anchor in the one document of an anchor on a page."""
    return page.replace("/", "-") + (f"--{name}" if name else "")


def article_of(page: str, html: str, pages: set[str], root: Path) -> Tag:
    """Return a built page as a section of the one document."""
    article = BeautifulSoup(html, "html.parser").select_one("article")
    if article is None:
        raise SystemExit(f"error: {page}.html has no article\n  remedy: make book")
    for dead in [node for node in article.find_all(True) if _is_dead(node)]:
        dead.extract()
    for fold in article.find_all("details", class_="dp-ours"):
        fold["open"] = ""
    for node in article.find_all(True):
        _rename_anchors(node, page)
        if not str(node.get("src", "data:")).startswith("data:"):
            node["src"] = urljoin(f"{(root / page).as_uri()}.html", str(node["src"]))
    for link in article.find_all("a", href=True):
        _lead_inside(link, page, pages)
    article.name, article["id"] = "section", anchor_of(page)
    return article


def _rename_anchors(node: Tag, page: str) -> None:
    """Give a node an id that no other page has, and what refers to an id inside of a drawing the new name."""
    for name, value in node.attrs.items():
        if name == "id" or (name == "aria-labelledby" and value):
            node[name] = " ".join(anchor_of(page, word) for word in str(value).split())
        elif name in ("href", "xlink:href") and node.name != "a" and str(value).startswith("#"):
            node[name] = f"#{anchor_of(page, str(value)[1:])}"
        elif "url(#" in str(value):
            node[name] = _REFERENCE.sub(lambda found: f"url(#{anchor_of(page, found[1])})", str(value))


def _is_dead(node: Tag) -> bool:
    """Whether a node is a control, or what only a click would open."""
    return node.name in DEAD_TAGS or not DEAD_CLASSES.isdisjoint(node.get_attribute_list("class"))


def _lead_inside(link: Tag, page: str, pages: set[str]) -> None:
    """Point a link to its place in the document; what is no part of the book is text on paper."""
    href = str(link["href"])
    if href.startswith(("http:", "https:", "mailto:")):
        return
    path, _, name = urljoin(f"/{page}.html", href).partition("#")
    target = unquote(path).removeprefix("/").removesuffix(".html")
    if target in pages:
        link["href"] = f"#{anchor_of(target, unquote(name))}"
    else:
        del link["href"]


def contents(found: list[Entry], titles: dict[str, str], numbers: dict[str, int]) -> str:
    """Return the table of contents as HTML."""
    lines = ['<nav class="book-contents"><h1>Contents</h1>']
    for page, depth, caption in found:
        lines += [f"<h2>{escape(caption)}</h2>"] if caption else []
        name, number = anchor_of(page), numbers.get(anchor_of(page), "")
        kind = ' class="below"' if depth else ""
        lines.append(f'<p{kind}><a href="#{name}">{escape(titles[page])}</a><span>{number}</span></p>')
    return "\n".join([*lines, "</nav>"])


def document(found: list[Entry], root: Path) -> tuple[str, dict[str, str]]:
    """Return the one document, with a mark where the contents go, and the title of every page."""
    pages = {page for page, *_ in found}
    head = BeautifulSoup((root / f"{found[0][0]}.html").read_text("utf-8"), "html.parser").head
    if head is None:
        raise SystemExit("error: the first page has no head\n  remedy: make book")
    base = f"{(root / found[0][0]).as_uri()}.html"
    for node in head.select("link[href], script[src]"):
        key = "href" if node.name == "link" else "src"
        node[key] = urljoin(base, str(node[key]))
    scripts = [str(node) for node in head.find_all("script") if "mathjax" in str(node).lower()]
    styles = [str(node) for node in head.select("link[rel=stylesheet], style")]
    titles, sections = {}, []
    for page, *_ in found:
        section = article_of(page, (root / f"{page}.html").read_text("utf-8"), pages, root)
        title = section.find("h1")
        titles[page] = title.get_text(strip=True) if title else page
        sections.append(str(section))
    head_text = "\n".join([*styles, *scripts, f"<style>{STYLE}</style>"])
    body = "\n".join([sections[0], "<!-- contents -->", *sections[1:]])
    head_text = f'<head><meta charset="utf-8"><title>DualPipe Lab</title>{head_text}</head>'
    body = f'<body><main class="book bd-content bd-article">{body}</main></body>'
    return f'<!doctype html><html lang="en" data-theme="light">{head_text}{body}</html>', titles


def print_book(found: list[Entry], target: Path, root: Path = HTML) -> int:
    """Write the PDF and return its number of pages."""
    text, titles = document(found, root.resolve())
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=_chromium(), args=list(FLAGS))
        numbers: dict[str, int] = {}
        for _ in range(2):
            source = Path(scratch) / "book.html"
            source.write_text(text.replace("<!-- contents -->", contents(found, titles, numbers)), encoding="utf-8")
            page = browser.new_page()
            page.set_default_timeout(600_000)
            page.goto(source.as_uri(), wait_until="load")
            page.evaluate("async () => { if (window.MathJax?.startup) await MathJax.startup.promise; }")
            page.pdf(
                path=target, format="A4", margin=MARGINS, outline=True, tagged=True, print_background=True,
                display_header_footer=True, header_template="<span></span>", footer_template=FOOTER,
            )  # fmt: skip
            page.close()
            numbers = page_numbers(target)
        browser.close()
    return len(PdfReader(target).pages)


def page_numbers(file: Path) -> dict[str, int]:
    """Return the page, counted from 1, of every anchor that a link of the file leads to."""
    reader = PdfReader(file)
    found = {name: reader.get_destination_page_number(place) for name, place in reader.named_destinations.items()}
    return {name.lstrip("/"): number + 1 for name, number in found.items() if number is not None}


def _chromium() -> str:
    """Return the system's Chromium; `CHROMIUM` in the environment names another one."""
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, CHROMIUM)), None)
    if path is None:
        remedy = "apt-get install chromium, or CHROMIUM=path"
        raise SystemExit(f"error: Chromium prints the book, and there is none\n  remedy: {remedy}")
    return path


def main() -> None:
    """Print the book of _toc.yml."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("_build/dualpipe-lab.pdf")
    found = entries(yaml.safe_load(Path("_toc.yml").read_text("utf-8")))
    missing = [page for page, *_ in found if not (HTML / f"{page}.html").exists()]
    if missing:
        raise SystemExit(f"error: {len(missing)} pages are not built, the first is {missing[0]}\n  remedy: make book")
    pages = print_book(found, target)
    print(f"==> {target}: {pages} pages, {target.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
