"""The page's script: bundles the ES modules of `static/` into one classic script or one module.

In: the files of `static/`.  Out: JavaScript text.
A classic script runs in every page, also from file:// and inside a notebook output.  A notebook widget needs a module.
The bundle needs no build tool: the modules import only each other, and no two of them define the same name.
"""

import json
import re
from functools import cache
from hashlib import sha256
from importlib import resources

ENTRY = "register.mjs"
_OWN = {"studio": "StudioElement", "planner": "PlannerElement"}  # elements with scripts of their own
_LIVE, _KERNEL = "live-model.mjs", "studio-kernel.mjs"
_IMPORT = re.compile(r'^import .*?from "\./([\w-]+\.mjs)";\n', re.MULTILINE | re.DOTALL)
_EXPORT = re.compile(r"^export (?=const|function|async|class)", re.MULTILINE)
_COMMENT = re.compile(r"^ *//.*\n|(?<=[;,{}(]) +// .*$", re.MULTILINE)
_INDENT = re.compile(r"^ +", re.MULTILINE)


@cache
def classic_script() -> str:
    """Return the script that defines the elements; a second run on a page has no effect."""
    return f"(() => {{\n{_joined(ENTRY)}register();\n}})();\n"


@cache
def element_script(name: str) -> str:
    """Return the script of an element such as the "studio", which needs the classic one before it."""
    define = f'customElements.get("dp-{name}") ?? customElements.define("dp-{name}", {_OWN[name]});'
    return f"(() => {{\n{_joined(f'{name}.mjs')}{define}\n}})();\n"


@cache
def live_module() -> str:
    """Return the module of live cells; it starts with the model, and needs no view."""
    return f"{_joined(_LIVE)}export default liveCell;\n"


@cache
def store_script() -> str:
    """Return the script of what a browser keeps, for pages without a drawing."""
    return f"(() => {{\n{_joined('store.mjs')}}})();\n"


@cache
def kernel_module() -> str:
    """Return the module by which a studio asks the kernel of its notebook."""
    return f"{_joined(_KERNEL)}export default studioKernel;\n"


def script_name() -> str:
    """Return the file name of the shared script; its hash keeps browsers from using an outdated copy."""
    return f"dualpipe-lab-{_hash(classic_script())}.js"


def element_script_name(name: str) -> str:
    """Return the file name of the script of an element such as the "studio"."""
    return f"dualpipe-lab-{name}-{_hash(element_script(name))}.js"


def _hash(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:10]


def source(name: str) -> str:
    """Return the text of one file of `static/`."""
    return (resources.files("dualpipe_lab.viz") / "static" / name).read_text(encoding="utf-8")


def _joined(entry: str) -> str:
    """Join a module and its imports, each once and after its own imports."""
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
    """Remove imports, exports, comments and indentation."""
    text = _EXPORT.sub("", _IMPORT.sub("", text))
    return _INDENT.sub("", _COMMENT.sub("", text)).replace("\n\n", "\n").replace("</script", "<\\/script")


def _style() -> str:
    return re.sub(r"\s+", " ", source("style.css"))
