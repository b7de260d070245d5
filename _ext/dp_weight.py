"""Takes out of the written pages what their readers do not use, and names what the theme leaves nameless.

In: the written pages and the theme's files.  Out: the same pages
  - without the 1.5 MB script that draws 2,000 icons: the icons in use are a font of some kB in the stylesheet;
  - with the theme's stylesheet without the rules of classes that no page and no script has;
  - without the search's index, which search.html alone needs; it is smaller, and beside it stand the definitions and
    first sentences that the search shows, so that it fetches no page;
  - with names for the arrows that fold the chapters in the sidebar, and without names that differ from visible words.
"""

import base64
import io
import json
import logging
import re
from collections.abc import Iterable
from html import unescape
from pathlib import Path

import pydata_sphinx_theme
from sphinx.application import Sphinx

STYLE = "styles/pydata-sphinx-theme.css"
SCRIPTED = {"bs-tooltip-auto"}  # classes that scripts put together from parts
GLOSSARY = "book/appendix/glossary"
LONGEST = 180  # characters that the search shows of a page
_ICONS = re.compile(r"<script[^>]*scripts/fontawesome\.js[^>]*></script>\s*")
_SEARCH = re.compile(r"<script[^>]*(?:searchtools|language_data|searchindex)\.js[^>]*></script>\s*")
_MARK = "(?:<span[^>]*>[^<]*</span>)?"
_FOLD = re.compile(
    rf'(<a class="(?:current )?reference internal" href="[^"]*">{_MARK})([^<]*)({_MARK}</a><details[^>]*><summary)>'
)
_LABELLED = re.compile(
    r'<(?:summary|button class="btn search-button-field[^>]*?)( aria-label="(?:Toggle hidden content|Search)")'
)
_RULE = re.compile(r"([^{}]+)\{([^{}]*)\}")
_FACE = re.compile(r"@font-face\{[^}]*?fontawesome/webfonts/([\w-]+)\.woff2[^}]*\}")
_TERMS = re.compile(r'((?:<dt id="term-[^"]*">.*?</dt>\s*)+)<dd>(.*?)</dd>', re.DOTALL)
_TERM = re.compile(r'<dt id="(term-[^"]*)">(.*?)</dt>', re.DOTALL)
_FIRST = re.compile(r"</h1>.*?<p>(.*?)</p>", re.DOTALL)


def named(page: str) -> str:
    """Name the sidebar's arrows after the chapters that they fold, and what shows words of its own by those.

    >>> named('<a class="reference internal" href="gpipe.html">GPipe</a><details><summary>')
    '<a class="reference internal" href="gpipe.html">GPipe</a><details><summary aria-label="Pages of GPipe">'
    >>> named('<summary aria-label="Toggle hidden content"><p>Show the code</p>')
    '<summary><p>Show the code</p>'
    """
    page = _LABELLED.sub(lambda found: found[0].replace(found[1], ""), page)
    return _FOLD.sub(lambda found: f'{found[1]}{found[2]}{found[3]} aria-label="Pages of {found[2].strip()}">', page)


def only_used(css: str, words: set[str]) -> str:
    """Return a stylesheet without the selectors that name a class that is not among the words.

    >>> only_used("/* a, b */.a,.b .c{top:0}@media print{.b{top:1px}}p:not(.b){top:0}", {"a", "c"})
    '.a{top:0}p:not(.b){top:0}'
    """

    def kept(rule: re.Match[str]) -> str:
        selectors = re.split(r",(?![^(]*\))", rule[1])
        used = [one for one in selectors if words.issuperset(re.findall(r"\.([A-Za-z][\w-]*)", _outside(one)))]
        return f"{','.join(used)}{{{rule[2]}}}" if used else ""

    css = _RULE.sub(kept, re.sub(r"/\*.*?\*/", "", css, flags=re.DOTALL))
    return re.sub(r"@(?:media|supports|container)[^{}]*\{\}", "", css)


def _outside(selector: str) -> str:
    """Return a selector without what stands in parentheses, as in `:not(.show)`."""
    return re.sub(r"\([^()]*\)", "", re.sub(r"\([^()]*\)", "", selector))


def with_icons(css: str, fonts: Path) -> str:
    """Put the icons that a stylesheet names into it, and leave the other 2,000 in their files."""
    signs = {int(sign, 16) for sign in re.findall(r'content:"\\(f[0-9a-f]{3})"', css)}

    def face(found: re.Match[str]) -> str:
        data = font_of(fonts / f"{found[1]}.ttf", signs)
        if not data:
            return ""
        return re.sub(r"src:.*?(?=[;}])", f'src:url("data:font/woff;base64,{data}") format("woff")', found[0])

    return _FACE.sub(face, css)


def font_of(path: Path, signs: Iterable[int]) -> str:
    """Return those of a font's signs that it has as a small font, in base64; without any of them nothing."""
    from fontTools import subset  # matplotlib brings it

    logging.getLogger("fontTools").setLevel(logging.WARNING)  # it tells of every table
    options = subset.Options(layout_features=[], flavor="woff", drop_tables=["GSUB", "GPOS"])
    out = io.BytesIO()
    with subset.load_font(str(path), options) as font:
        found = set(signs) & set(font.getBestCmap())
        if not found:
            return ""
        subsetter = subset.Subsetter(options)
        subsetter.populate(unicodes=found)
        subsetter.subset(font)
        subset.save_font(font, out, options)
    return base64.b64encode(out.getvalue()).decode()


def plain(html: str) -> str:
    """Return the words of a piece of a page, cut after `LONGEST` characters.

    >>> plain('Idle <em>time</em> &lt; work.<a class="headerlink" href="#x">#</a>')
    'Idle time < work.'
    """
    left_out = r'<mjx-math.*?</mjx-math>|<sup class="dp-mark">.*?</sup>|<a class="headerlink".*?</a>'
    text = re.sub(left_out, "", html, flags=re.DOTALL)
    text = " ".join(unescape(re.sub(r"<[^>]*>", "", text)).split())
    return text if len(text) <= LONGEST else text[:LONGEST].rpartition(" ")[0] + " ..."


def small_index(script: str) -> str:
    """Return the search's index without rare numbers, and without the reference's entries, which its names repeat."""
    start, end = script.index("(") + 1, script.rindex(")")
    index = json.loads(script[start:end])
    home = index["docnames"].index(GLOSSARY)
    entries = {word: [entry for entry in found if entry[0] == home] for word, found in index["indexentries"].items()}
    index["indexentries"] = {word: found for word, found in entries.items() if found}
    index["terms"] = {word: found for word, found in index["terms"].items() if not _is_rare(word, found)}
    return script[:start] + json.dumps(index, separators=(",", ":"), ensure_ascii=False) + script[end:]


def _is_rare(word: str, pages: int | list[int]) -> bool:
    return any(sign.isdigit() for sign in word) and (isinstance(pages, int) or len(pages) < 3)


def notes_of(pages: dict[str, str]) -> dict[str, list[str]]:
    """Return what the search says of each page and of each term: a title of its own if it has one, and words."""
    notes = {name: ["", plain(found[1])] for name, page in pages.items() if (found := _FIRST.search(page))}
    for terms, words in _TERMS.findall(pages.get(GLOSSARY, "")):
        for key, term in _TERM.findall(terms):
            notes[f"{GLOSSARY}#{key}"] = [plain(term), plain(words)]
    return notes


def add_search(app: Sphinx, page: str, template: str, context: dict[str, object], doctree: object) -> None:
    """Load what shows the hits on the search's page."""
    if page == "search":
        for name in ("search-notes.js", "dp/search.js"):
            app.add_js_file(name, loading_method="defer")


def lighten(app: Sphinx, error: Exception | None) -> None:
    """Change the written pages and stylesheets."""
    if error is not None or app.builder.format != "html":
        return
    out = Path(app.outdir)
    pages = {path.relative_to(out).with_suffix("").as_posix(): path for path in out.rglob("*.html")}
    texts = {name: path.read_text(encoding="utf-8") for name, path in pages.items()}
    for name, text in texts.items():
        lighter = named(_ICONS.sub("", text if name == "search" else _SEARCH.sub("", text)))
        if lighter != text:
            pages[name].write_text(lighter, encoding="utf-8")
    static, theme = out / "_static", Path(pydata_sphinx_theme.__file__).parent / "theme/pydata_sphinx_theme/static"
    for path in (static / "scripts").glob("fontawesome.*"):
        path.unlink()
    words = {
        word for text in texts.values() for names in re.findall(r'class="([^"]*)"', text) for word in names.split()
    }
    for script in static.rglob("*.js"):
        words.update(re.findall(r"[\w-]+", script.read_text(encoding="utf-8")))
    css = only_used((theme / STYLE).read_text(encoding="utf-8"), words | SCRIPTED)
    (static / STYLE).write_text(with_icons(css, theme / "vendor/fontawesome/webfonts"), encoding="utf-8")
    index = out / "searchindex.js"
    index.write_text(small_index(index.read_text(encoding="utf-8")), encoding="utf-8")
    notes = json.dumps(notes_of(texts), ensure_ascii=False, separators=(",", ":"))
    (static / "search-notes.js").write_text(f"const SEARCH_NOTES = {notes};\n", encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Run when all pages are written and their formulas set."""
    app.connect("html-page-context", add_search)
    app.connect("build-finished", lighten, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
