"""A real JupyterLab or Notebook 7 on loopback for tests: private folders, a token, no way outside."""

import json
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest

ROOT = Path(__file__).parents[1]
SECONDS = 60  # for a busy machine; each wait takes a second or two where nothing else runs
TALKS = {"expose_app_in_browser": True}  # the tests talk to window.jupyterapp
SILENT = {"news_url": None, "check_for_updates_class": "jupyterlab.handlers.announcements.NeverCheckForUpdate"}
SETTINGS = {
    "ServerApp": {"ip": "127.0.0.1", "port": 0, "open_browser": False, "allow_root": True, "terminals_enabled": False},
    "LabApp": {**TALKS, **SILENT, "extension_manager": "readonly"},
    "JupyterNotebookApp": TALKS,
}
ADDRESSES = {"lab": "lab/tree/{name}?token={token}&reset", "notebook": "notebooks/{name}?token={token}"}
NOTIFICATIONS = {"fetchNews": "false", "checkForUpdates": False}  # otherwise a dialog asks for leave

KERNEL = "jupyterapp.shell.currentWidget.sessionContext.session?.kernel"
IS_OPEN = "() => window.jupyterapp?.shell.currentWidget?.context?.isReady"
IS_READY = f"() => {KERNEL}?.status === 'idle'"
# Commands are not waited for: their promise may depend on a dialog.
RUN_ALL = "() => void jupyterapp.commands.execute('notebook:run-all-cells')"
HAS_RUN = "() => jupyterapp.shell.currentWidget.content.widgets.every(cell => cell.model.executionCount > 0)"
SAVE = "() => void jupyterapp.commands.execute('docmanager:save')"
IS_SAVED = "() => !jupyterapp.shell.currentWidget.context.model.dirty"
DISMISS = "() => document.querySelector('.jp-Dialog button.jp-mod-reject')?.click()"
ASK = f"""([code, expression]) => {{
  const future = {KERNEL}.requestExecute({{ code, user_expressions: {{ value: expression }}, store_history: false }});
  const answer = future.done.then(({{ content }}) => content.user_expressions?.value?.data?.["text/plain"]);
  return Promise.race([answer, new Promise(done => setTimeout(done, 20000, "no answer"))]);
}}"""


class LabServer:
    """One `jupyter lab` or `jupyter notebook` process whose notebooks, settings and runtime files lie in `folder`."""

    def __init__(self, folder, app="lab", command=None):
        """Start Jupyter, or another command that becomes it, which then brings its own settings."""
        self.app = app
        self.folder, self.notebooks, self.token = folder, folder / "notebooks", secrets.token_hex(16)
        for name in ("notebooks", "runtime", "config", "data"):
            (folder / name).mkdir()
        with (folder / "log").open("w") as log:
            self.process = psutil.Popen(
                [*(command or self.quiet()), f"--IdentityProvider.token={self.token}"],
                cwd=self.notebooks,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def quiet(self):
        """Write settings that ask nobody anything; return the command that starts the application."""
        (self.folder / "config" / f"jupyter_{self.app}_config.json").write_text(json.dumps(SETTINGS))
        notification = (
            self.folder / "settings" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
        )
        notification.parent.mkdir(parents=True)
        notification.write_text(json.dumps(NOTIFICATIONS))
        return [sys.executable, "-m", "jupyter", self.app]

    def environment(self):
        folders = {f"JUPYTER_{name.upper()}_DIR": str(self.folder / name) for name in ("config", "data", "runtime")}
        folders |= {f"JUPYTERLAB_{name.upper()}_DIR": str(self.folder / name) for name in ("settings", "workspaces")}
        folders |= {"IPYTHONDIR": str(self.folder / "ipython"), "PYTHONPATH": str(ROOT)}
        nowhere = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")  # what asks outside, fails
        return {**os.environ, **folders, **nowhere, "no_proxy": "127.0.0.1"}

    @property
    def log(self):
        return (self.folder / "log").read_text()

    def address(self):
        """Wait for the server's own note of where it listens."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            for file in (self.folder / "runtime").glob("jpserver-*.json"):
                if text := file.read_text():
                    return json.loads(text)["url"]
            time.sleep(0.05)
        raise RuntimeError(f"jupyter {self.app} did not start; its log:\n{self.log[-3000:]}")

    def stop(self):
        """End the server; return the names of processes that outlived it, after ending them too.

        On a busy machine Jupyter itself may not end when it is asked; what it started has to end all the same.
        """
        family = self.process.children(recursive=True)
        self.process.terminate()
        for process in psutil.wait_procs([self.process], timeout=SECONDS)[1]:
            process.kill()
        psutil.wait_procs([self.process], timeout=SECONDS)
        _, left = psutil.wait_procs(family, timeout=SECONDS)
        names = [process.name() for process in left if process.status() != psutil.STATUS_ZOMBIE]
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=SECONDS)  # one that nobody waited for warns in whichever test runs next
        return names

    def write(self, name, *cells):
        """Write a notebook that has not been run; return its name."""
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
        nbformat.write(notebook, self.notebooks / name)
        return name

    def copy(self, name, new_name, change=lambda notebook: None):
        """Copy a saved notebook; JupyterLab trusts the copy exactly if nothing in it is changed."""
        notebook = nbformat.read(self.notebooks / name, as_version=4)
        change(notebook)
        nbformat.write(notebook, self.notebooks / new_name)
        return new_name


class LabPage:
    """JupyterLab in a browser profile of its own."""

    def __init__(self, browser, server):
        self.server, self.fetched, self.is_open = server, [], False
        self.context = browser.new_context(viewport={"width": 1280, "height": 2200})
        self.page = self.context.new_page()
        self.page.on("request", lambda request: self.fetched.append(request.url))
        self.page.on("websocket", lambda socket: self.fetched.append(socket.url.replace("ws:", "http:", 1)))

    def open(self, name):
        """Open a notebook, alone in a new workspace."""
        address = ADDRESSES[self.server.app].format(name=name, token=self.server.token)
        self.page.goto(self.server.url + address)
        self.until(IS_OPEN, "the notebook is open")
        self.is_open = True
        return self

    def run(self):
        """Run all cells and save; a command to run that comes before the kernel is lost."""
        self.until(IS_READY, "the kernel is idle")
        self.page.evaluate(RUN_ALL)
        self.until(HAS_RUN, "every cell has run")
        self.until(IS_READY, "the kernel is idle again")
        self.page.evaluate(SAVE)
        self.until(IS_SAVED, "the notebook is saved")

    def until(self, condition, what, arg=None):
        """Wait, and send dialogs away; after too long say what did not happen."""
        timed_out = pytest.importorskip("playwright.sync_api").TimeoutError
        for _ in range(SECONDS // 2):
            try:
                return self.page.wait_for_function(condition, arg=arg, timeout=2000)
            except timed_out:
                self.page.evaluate(DISMISS)
        return pytest.fail(f"not within {SECONDS} s: {what}; the server's log:\n{self.server.log[-2000:]}")

    def ask(self, expression, code=""):
        """Run code in the kernel; return how it writes the value of an expression."""
        self.until(IS_READY, "the kernel is idle")
        return self.page.evaluate(ASK, [code, expression])

    def told(self, expression, text):
        """Wait until the kernel writes an expression so: what the reader does reaches it by messages."""
        deadline, answer = time.monotonic() + SECONDS, self.ask(expression)
        while answer != text and time.monotonic() < deadline:
            time.sleep(0.05)
            answer = self.ask(expression)
        assert answer == text, expression

    def cells(self):
        """The notebook's number of cells, as long as the first one is selected."""
        script = "() => { const { activeCellIndex, widgets } = jupyterapp.shell.currentWidget.content;"
        return self.page.evaluate(f"{script} return activeCellIndex ? 0 : widgets.length; }}")

    def picture(self):
        path = self.server.folder / "jupyterlab.png"
        self.page.screenshot(path=path)
        return path

    def strangers(self):
        """What was fetched from elsewhere, and what would make the server ask elsewhere."""
        outside = [url for url in self.fetched if not url.startswith((self.server.url, "data:", "blob:"))]
        return outside + [url for url in self.fetched if "/lab/api/news" in url or "/lab/api/update" in url]
