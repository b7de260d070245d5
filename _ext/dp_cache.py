"""Runs a page again exactly when something changed that its code may execute.

jupyter-cache keys a page's outputs by the text of its cells alone.  Here each page has a cache folder of its own for
each state of what it depends on: the files of the library that it imports, directly or in turn (`dp_imports`), the
locked versions, Python and torch.  A page of the reference depends on the whole library and runs nothing.
In: the Sphinx application.  Out: handlers on its events.
  env-get-outdated   pages whose state is another one than when they were read are read again
  source-read        the page's cache folder, before its code may run
"""

import hashlib
import platform
from collections.abc import Iterable
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import jupytext
from dp_imports import Library
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

EXECUTED = "format_name: myst"  # in the header of a page whose code runs
REFERENCE = ".. facade::"


class States:
    """The state of each page: a hash of everything outside it that its outputs depend on."""

    def __init__(self, root: Path) -> None:
        self.root, self._library, self._hashes, self._states = root, Library(root), dict[Path, str](), dict[Path, str]()

    @cached_property
    def versions(self) -> list[str]:
        """The versions that no file of the library names."""
        return [platform.python_version(), metadata.version("torch")]

    def of(self, page: Path) -> str:
        """Return the state of a page; nothing for one that depends on no library."""
        if page not in self._states:
            text = page.read_text(encoding="utf-8")
            if REFERENCE in text:
                self._states[page] = self._hash(page, self._library.all_files())
            elif page.suffix == ".md" and EXECUTED not in text.partition("\n# ")[0]:
                self._states[page] = ""
            else:
                self._states[page] = self._hash(page, self._library.files_of(code_of(page)))
        return self._states[page]

    def _hash(self, page: Path, files: Iterable[Path]) -> str:
        lock = self.root / "requirements.txt"
        known = sorted(path.relative_to(self.root).as_posix() for path in (*files, *([lock] * lock.exists())))
        parts = [page.relative_to(self.root).as_posix(), *self.versions]
        parts += [f"{name}\0{self._hash_of_file(self.root / name)}" for name in known]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    def _hash_of_file(self, path: Path) -> str:
        if path not in self._hashes:
            self._hashes[path] = hashlib.sha256(path.read_bytes()).hexdigest()
        return self._hashes[path]


def code_of(page: Path) -> str:
    """Return the code of a page's cells."""
    return "\n".join(cell.source for cell in jupytext.read(page).cells if cell.cell_type == "code")


class PageCaches:
    """The handlers: a page's state is kept in the environment, `dp_states`, from one build to the next."""

    def prepare(self, app: Sphinx) -> None:
        """Look at the library as it is now."""
        self._states, self._excluded = States(Path(app.srcdir)), app.config.nb_execution_excludepatterns
        self._folder = Path(app.outdir).parent.resolve() / ".jupyter_cache"

    def outdated(
        self, app: Sphinx, env: BuildEnvironment, added: set[str], changed: set[str], removed: set[str]
    ) -> list[str]:
        """Return the pages that have to be read again, although their text is as it was."""
        known = _known(env)
        return [name for name in env.found_docs - added - changed if known.get(name, "") != self._of(env, name)]

    def choose(self, app: Sphinx, name: str, source: list[str]) -> None:
        """Give the page that is about to be read its cache folder."""
        env: Any = app.env
        state = _known(env)[name] = self._of(env, name)
        env.mystnb_config = env.mystnb_config.copy(execution_cache_path=str(self._folder / (state or "unexecuted")))

    def _of(self, env: BuildEnvironment, name: str) -> str:
        page = Path(env.doc2path(name))
        return "" if any(page.match(pattern) for pattern in self._excluded) else self._states.of(page)


def merge(app: Sphinx, env: BuildEnvironment, names: Iterable[str], other: BuildEnvironment) -> None:
    """Take over the states of pages that another process has read."""
    _known(env).update({name: state for name, state in _known(other).items() if name in set(names)})


def forget(app: Sphinx, env: BuildEnvironment, name: str) -> None:
    """Forget a page that is gone."""
    _known(env).pop(name, None)


def _known(env: Any) -> dict[str, str]:
    if not hasattr(env, "dp_states"):
        env.dp_states = {}
    states: dict[str, str] = env.dp_states
    return states


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the handlers."""
    caches = PageCaches()
    app.connect("builder-inited", caches.prepare)
    app.connect("env-get-outdated", caches.outdated)
    app.connect("source-read", caches.choose)
    app.connect("env-merge-info", merge)
    app.connect("env-purge-doc", forget)
    return {"env_version": 1, "parallel_read_safe": True, "parallel_write_safe": True}
