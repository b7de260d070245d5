"""The page's script: the ES modules of `static/` in one text, as a classic script or as one module.

A classic script runs wherever HTML does, also from file:// and in an output that carries it along; a notebook widget
needs a module.  Joining them takes no tools: the modules import only each other, and no two define the same name.
"""

import json
import re
from functools import cache
from hashlib import sha256
from importlib import resources

ENTRY = "register.mjs"
_WIDGET = "widget.mjs"
_IMPORT = re.compile(r'^import .*?from "\./([\w-]+\.mjs)";\n', re.MULTILINE | re.DOTALL)
_EXPORT = re.compile(r"^export (?=const|function|async|class)", re.MULTILINE)
_COMMENT = re.compile(r"^ *//.*\n|(?<=[;,{}(]) +// .*$", re.MULTILINE)
_INDENT = re.compile(r"^ +", re.MULTILINE)


@cache
def classic_script() -> str:
    """Return the script that defines the elements; running it again on a page changes nothing."""
    return f"(() => {{\n{_joined(ENTRY)}register();\n}})();\n"


@cache
def widget_module() -> str:
    """Return the module of the notebook widget: the same code, with `render` as anywidget expects it."""
    return f"{_joined(_WIDGET)}export default {{ render }};\n"


def script_name() -> str:
    """Return the file name of the shared script; it changes with the text, so that no browser keeps an old one."""
    return f"dualpipe-lab-{sha256(classic_script().encode()).hexdigest()[:10]}.js"


def source(name: str) -> str:
    """Return the text of one file of `static/`."""
    return (resources.files("dualpipe_lab.viz") / "static" / name).read_text(encoding="utf-8")


def _joined(entry: str) -> str:
    """Join a module and all that it imports, each once and after what it needs."""
    texts: dict[str, str] = {}
    _collect(entry, texts, open_names=())
    return "".join(_plain(text) for text in texts.values())


def _collect(name: str, texts: dict[str, str], open_names: tuple[str, ...]) -> None:
    if name in texts:
        return
    if name in open_names:
        raise ValueError(f"modules import each other in a circle: {' -> '.join([*open_names, name])}; break it")
    text = f"export const STYLE = {json.dumps(_style())};\n" if name == "style.mjs" else source(name)
    for needed in _IMPORT.findall(text):
        _collect(needed, texts, (*open_names, name))
    texts[name] = text


def _plain(text: str) -> str:
    """Drop imports, exports, comments and indentation: what a reader of the page's source does not need."""
    text = _EXPORT.sub("", _IMPORT.sub("", text))
    return _INDENT.sub("", _COMMENT.sub("", text)).replace("\n\n", "\n").replace("</script", "<\\/script")


def _style() -> str:
    return re.sub(r"\s+", " ", source("style.css"))
