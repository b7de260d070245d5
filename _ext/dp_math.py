"""Sets the book's mathematics when it is built: a page moves its formulas, not the 1.2 MB that set them.

In: the written pages, MathJax of the sphinx-mathjax-offline package, Node.js.  Out: the pages with set formulas, each
with MathML for screen readers; one stylesheet with the signs in use; and MathJax's fonts.  Without Node.js the pages
load MathJax, from _static too.
"""

import importlib.util
import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

# All that tex-chtml.js can load: the fonts, TeX packages on demand, and the readers that its menu offers.
MATHJAX_PARTS = ("tex-chtml.js", "output/chtml", "input/tex/extensions", "a11y", "sre")
FONTS = "output/chtml/fonts/woff-v2"
_ELEMENT = re.compile(
    r'(?P<open><(?P<tag>span|div) class="(?:\w+ )*math notranslate[^>]*>)(?P<body>.*?)(?=</(?P=tag)>)', re.DOTALL
)
_TEX = re.compile(r"\\\((?P<inline>.*)\\\)|\\\[(?P<display>.*)\\\]|(?P<own>\\begin\{.*\})", re.DOTALL)
_LOADER = re.compile(r'<script[^>]*src="(?P<up>[^"]*)_static/mathjax/tex-chtml\.js[^>]*></script>')
_SIGN = re.compile(r'mjx-c\.(mjx-c[0-9A-F]+(?:\.TEX-\w+)?)[^{}]*\{(?:"(?:\\.|[^"\\])*"|[^}"])*\} ?')  # content: "}"

Formula = tuple[str, bool]  # TeX, and whether it stands alone


def formulas_of(page: str) -> list[Formula]:
    r"""Return the formulas of a page.

    >>> formulas_of(r'<p>see <span class="math notranslate nohighlight">\(a &lt; b\)</span></p>')
    [('a < b', False)]
    """
    return [_formula(match) for element in _ELEMENT.finditer(page) for match in _TEX.finditer(element["body"])]


def _formula(match: re.Match[str]) -> Formula:
    return unescape(match[match.lastgroup or 0]), match.lastgroup != "inline"


def with_set(page: str, done: dict[Formula, str]) -> str:
    """Replace the TeX of a page by set formulas, and the script by their stylesheet."""
    page = _ELEMENT.sub(lambda e: e["open"] + _TEX.sub(lambda tex: done[_formula(tex)], e["body"]), page)
    return _LOADER.sub(r'<link rel="stylesheet" href="\g<up>_static/mathjax/math.css" />', page)


def only_signs(css: str, pages: str) -> str:
    """Return the stylesheet without the signs that no page shows: MathJax knows two thousand."""
    used = {names.replace(" ", ".") for names in re.findall(r'class="(mjx-c[0-9A-F]+(?: TEX-\w+)?)"', pages)}
    return _SIGN.sub(lambda rule: rule[0] if rule[1] in used else "", re.sub(r"\s+", " ", css))


def mathjax_folder() -> Path:
    """Return the folder of the installed MathJax."""
    spec = importlib.util.find_spec("sphinx-mathjax-offline")
    if spec is None or spec.origin is None:
        raise ExtensionError("MathJax is missing: run `pip install -r requirements.txt` (sphinx-mathjax-offline)")
    return Path(spec.origin).parent / "static" / "mathjax"


def run_mathjax(formulas: list[Formula]) -> tuple[dict[Formula, str], str]:
    """Return the formulas' HTML and MathJax's whole stylesheet."""
    script = Path(__file__).with_name("math.mjs")
    command = [str(shutil.which("node")), str(script), str(mathjax_folder()), "fonts"]
    answer = subprocess.run(command, input=json.dumps(formulas), capture_output=True, text=True, check=True)  # noqa: S603
    found = json.loads(answer.stdout)
    return dict(zip(formulas, found["formulas"], strict=True)), found["css"]


def set_formulas(app: Sphinx, error: Exception | None) -> None:
    """Set the formulas of all pages, or give the pages what sets them in the browser."""
    if error is not None or app.builder.format != "html":
        return
    source, target = mathjax_folder(), Path(app.outdir) / "_static" / "mathjax"
    if shutil.which("node") is None:
        for part in MATHJAX_PARTS:
            _copy(source / part, target / part)
        return
    pages = {path: path.read_text(encoding="utf-8") for path in Path(app.outdir).rglob("*.html")}
    done, css = run_mathjax(sorted({formula for page in pages.values() for formula in formulas_of(page)}))
    for path, page in pages.items():
        pages[path] = with_set(page, done)
        if pages[path] != page:
            path.write_text(pages[path], encoding="utf-8")
    _copy(source / FONTS, target / "fonts")
    (target / "math.css").write_text(only_signs(css, "".join(pages.values())), encoding="utf-8")


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
    else:
        shutil.copy2(source, target)


def setup(app: Sphinx) -> dict[str, bool]:
    """Run when all pages are written."""
    app.connect("build-finished", set_formulas)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
