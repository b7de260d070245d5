"""JupyterLab on a learner's folder: the course's settings, a layout to begin with, one server per folder.

In: a workspace and JupyterLab's own options.  Out: nothing comes back, the process becomes the server.
Settings come from `jupyter/` beside this file; the learner's own, in the home folder, are read and win, and nothing is
written there: the layout and the list of trusted outputs lie in the workspace.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import copyfile
from typing import Any, NoReturn

from dualpipe_course import record
from dualpipe_course.workspace.start_page import PLACE
from dualpipe_lab._optional import extra

SETTINGS = Path(__file__).with_name("jupyter")
LAYOUT = "layout.json"  # of a window that nobody has arranged yet
WINDOW = "default-37a8.jupyterlab-workspace"  # the name that JupyterLab gives to its first window


def running(folder: Path) -> str:
    """Return the address of a JupyterLab that runs on a folder, and nothing if none does."""
    with extra("book", "make lab"):
        from jupyter_server.serverapp import list_running_servers
    for server in list_running_servers():
        if Path(server["root_dir"]).resolve() == folder.resolve():
            return f"{server['url']}lab/tree/{PLACE}?token={server['token']}"
    return ""


def trust(folder: Path, data: bytes) -> None:
    """Let JupyterLab show the outputs of a notebook that the course wrote, pictures that play included."""
    import nbformat
    from nbformat.sign import NotebookNotary

    files = {name: str(path) for name, path in _trusted(folder).items()}
    notary: Any = NotebookNotary(**files)  # type: ignore[no-untyped-call]
    notary.sign(nbformat.reads(data.decode(), as_version=4))  # type: ignore[no-untyped-call]
    notary.store.close()


def start(folder: Path, options: Sequence[str]) -> NoReturn:
    """Become JupyterLab on a folder."""
    with extra("book", "make lab"):
        import jupyterlab  # type: ignore[import-untyped]  # noqa: F401
    window = _hidden(folder) / "workspaces" / WINDOW
    if not window.exists():
        window.parent.mkdir(parents=True, exist_ok=True)
        copyfile(SETTINGS / LAYOUT, window)
    trusted = [f"--NotebookNotary.{name}={path}" for name, path in _trusted(folder).items()]
    root = [f"--ServerApp.root_dir={folder.resolve()}", f"--LabApp.default_url=/lab/tree/{PLACE}"]
    rights = ["--allow-root"] if os.geteuid() == 0 else []
    command = [sys.executable, "-m", "jupyterlab", *root, *trusted, *rights, *options]
    os.execve(sys.executable, command, {**os.environ, **environment(folder)})  # noqa: S606 - no shell, our own list


def environment(folder: Path) -> dict[str, str]:
    """Return the variables that bring JupyterLab the course's settings and keep its layout in a folder."""
    paths = [str(SETTINGS), *filter(None, [os.environ.get("JUPYTER_CONFIG_PATH")])]
    return {
        "JUPYTER_CONFIG_PATH": os.pathsep.join(paths),
        "JUPYTERLAB_WORKSPACES_DIR": str(_hidden(folder) / "workspaces"),
    }


def _hidden(folder: Path) -> Path:
    return folder.resolve() / record.FOLDER


def _trusted(folder: Path) -> dict[str, Path]:
    return {"db_file": _hidden(folder) / "trusted.db", "secret_file": _hidden(folder) / "trusted.key"}
