"""Plant the faults of faults.toml in the library, one at a time, and write down which test notices each.

A fault is one line that becomes a wrong one; the line is found by its text, in whichever file it lies now.  All happens
in a scratch worktree of a commit.  The tests that need the file run as `make test` runs them, nearest first: the file's
own doctests and the tests that import it, then those of their directories, then those that import it through others.
The first failure ends the run.  `--resume` leaves out faults that are decided in the table of results.  `--confirm`
runs the tests that noticed faults once more without any: what fails then has noticed nothing.
"""

import ast
import csv
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Annotated, NamedTuple
from zlib import crc32

import pytest
from typer import Option, run

LIST = Path(__file__).with_suffix(".toml")
LIBRARY = ("dualpipe_lab", "dualpipe_course", "dualpipe_ours")
COLUMNS = ("fault", "status", "by", "seconds", "wrong")
NOTICED, NOBODY, UNDECIDED = "noticed", "nobody", "not decided in time"
ACCOUNT = "FAULTS_ACCOUNT"  # the variable that names the file into which a run of pytest writes its failures
PYTEST = (sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-p", "faults")
FIRST_RUN = 4  # files in the first run of pytest; each run takes twice as many, as each imports torch anew


class Fault(NamedTuple):
    """A line of the library, and the line that stands there when the fault is planted."""

    name: str
    file: str
    old: str
    new: str
    wrong: str

    def find(self, tree: Path) -> tuple[Path, int]:
        """Return the file and the index of the line; it is looked for in its file, and then in all of the library."""
        everywhere = [path for part in LIBRARY for path in sorted((tree / part).rglob("*.py"))]
        for files in ([tree / self.file], everywhere):
            found = [(path, at) for path in files for at, line in enumerate(code_of(path)) if line == self.old]
            if len(found) == 1:
                return found[0]
        problem = f"{len(found)} lines read" if found else "no line reads"
        raise ValueError(f"{self.name}: {problem} {self.old!r}; write down a line that stands once in the library")

    @contextmanager
    def planted(self, tree: Path) -> Iterator[Path]:
        """Put the wrong line into its file, and the right one back."""
        path, place = self.find(tree)
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines(keepends=True)
        indentation = lines[place][: len(lines[place]) - len(lines[place].lstrip())]
        lines[place] = f"{indentation}{self.new}\n"
        path.write_text("".join(lines), encoding="utf-8")
        try:
            yield path
        finally:
            path.write_text(text, encoding="utf-8")


def faults() -> list[Fault]:
    """Return the list; a name is `package/words`."""
    packages = tomllib.loads(LIST.read_text(encoding="utf-8"))
    return [Fault(f"{package}/{name}", **fields) for package, rows in packages.items() for name, fields in rows.items()]


@cache
def code_of(path: Path) -> list[str]:
    """Return the lines of a file without their indentation and the comments behind them."""
    return [line.split("  # ")[0].strip() for line in text_of(path).splitlines()]


def text_of(path: Path) -> str:
    """Return the text of a file, or nothing where there is none."""
    return path.read_text(encoding="utf-8") if path.is_file() else ""


class ImportGraph:
    """Which Python file of the library and of the tests uses which, through façades too."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        library = (path for part in LIBRARY for path in (tree / part).rglob("*.py"))
        self.files = {".".join(path.relative_to(tree).with_suffix("").parts): path for path in library}
        self.files = {module.removesuffix(".__init__"): path for module, path in self.files.items()}
        self.files |= {path.stem: path for path in (tree / "tests").rglob("*.py") if path.stem != "conftest"}
        self.users: defaultdict[str, Counter[str]] = defaultdict(Counter)  # of a module: who names it, how often
        handed_out = self._names_of_facades()
        for module, path in self.files.items():
            text = f"{text_of(path)}\n{text_of(path.with_name('conftest.py'))}"
            text = re.sub(r"^ *(>>>|\.\.\.) .*", "", text, flags=re.M)  # examples are no imports
            nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
            pairs = [(node.module or "", one.name) for node in nodes for one in node.names]
            used = re.findall(r"(?:import|from|-m) (dualpipe_[\w.]+)", text)  # in strings, too, for other processes
            used += [name for source, attribute in pairs for name in (source, f"{source}.{attribute}")]
            pairs += re.findall(r"\b(\w+)(?=\.(\w+))", text)
            for name in [*used, *(handed_out[pair] for pair in pairs if pair in handed_out)]:
                self.users[name][module] += 1

    def _names_of_facades(self) -> dict[tuple[str, str], str]:
        """Return where `dp.Zero1` comes from: by the words before and behind the dot, and by the full name, too."""
        found = {}
        for package, path in self.files.items():
            for source, name in re.findall(r"^from (\S+) import (\w+)", text_of(path.with_suffix(".pyi")), re.M):
                module = f"{package}{source}".rstrip(".") if source.startswith(".") else source
                module = f"{module}.{name}" if source == "." else module
                for word in (package, package.rpartition(".")[2], *(["lab"] if package == "dualpipe_lab" else [])):
                    found[word, name] = module
        return found

    def tests_of(self, path: Path) -> list[str]:
        """Return the files whose tests need a file of the library, nearest first, and then those that name it most."""
        start = next(module for module, file in self.files.items() if file == path)
        distances, queue = {start: 0}, [start]
        for module in queue:
            new = [user for user in self.users[module] if user not in distances]
            distances |= dict.fromkeys(new, distances[module] + 1)
            queue += new
        home = self.tree / "tests" / path.relative_to(self.tree).parts[1]
        found = [module for module in distances if module.startswith("test_") or ">>> " in text_of(self.files[module])]
        near = {home, *(self.files[module].parent for module in found if distances[module] == 1)} - {home.parent}

        def closeness(module: str) -> tuple[int | bool, ...]:
            file, distance = self.files[module], distances[module]
            ring = distance if distance < 2 else 2 if file.parent in near else 3
            return ring, module.startswith(LIBRARY), file.parent != home, distance, -self.users[start][module]

        return [str(self.files[module].relative_to(self.tree)) for module in sorted(found, key=closeness)]


def pytest_configure(config: pytest.Config) -> None:
    """As a plugin of pytest: begin the account of a run."""
    if account := os.environ.get(ACCOUNT):
        Path(account).touch()
        config.pluginmanager.register(Account(Path(account)), ACCOUNT)


class Account:
    """Writes failures into a file at once, and runs quick tests before slow ones, file by file as they were named."""

    def __init__(self, file: Path) -> None:
        self.file = file

    @pytest.hookimpl(trylast=True)  # after tests/conftest.py, which puts slow files first
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Sort the tests of a run."""
        order = {str(Path(name.partition("::")[0]).resolve()): place for place, name in enumerate(config.args)}
        items.sort(key=lambda item: (item.get_closest_marker("slow") is not None, order.get(str(item.path), 0)))

    def pytest_runtest_logreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        """Write down a test that failed, or a file that could not be collected."""
        if report.failed:
            with self.file.open("a", encoding="utf-8") as file:
                file.write(f"{report.nodeid}\n")

    pytest_collectreport = pytest_runtest_logreport


def failures(names: list[str], tree: Path, limit: float, through: str, *options: str) -> tuple[list[str], float]:
    """Run tests by name for at most so many seconds; return those that failed, and the seconds.

    The clock starts when pytest does, so a command that it runs `through` may wait for its turn.
    """
    with tempfile.TemporaryDirectory() as scratch:
        account, begun = Path(scratch) / "failures", None
        own = {"PYTHONPATH": os.pathsep.join([str(tree), str(LIST.parent)]), ACCOUNT: str(account)}
        with (Path(scratch) / "output").open("w+b") as output:
            command = [*shlex.split(through), *PYTEST, *options, *names]
            process = subprocess.Popen(
                command, cwd=tree, env=os.environ | own, stdout=output, stderr=output, process_group=0
            )
            try:
                while process.poll() is None and (begun is None or time.monotonic() < begun + limit):
                    time.sleep(0.2)
                    begun = time.monotonic() if begun is None and account.exists() else begun
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            if begun is None or process.returncode in (3, 4):
                output.seek(0)
                raise RuntimeError(f"pytest has run no test: {output.read().decode(errors='replace')[-2000:]}")
        return account.read_text(encoding="utf-8").splitlines(), time.monotonic() - begun


def noticed(fault: Fault, graph: ImportGraph, limit: float, through: str) -> tuple[str, str, float]:
    """Plant a fault and run the tests that need its file; return the status, the test that noticed it, and seconds."""
    done, spent = 0, 0.0
    with fault.planted(graph.tree) as path:
        files = graph.tests_of(path)
        while done < len(files):
            few = files[done : 2 * done + FIRST_RUN]
            found, seconds = failures(few, graph.tree, limit - spent, through, "-x")
            spent += seconds
            if found:
                return NOTICED, found[0], spent
            if spent >= limit:
                return UNDECIDED, f"{done} of {len(files)} files have run", spent
            done += len(few)
    return NOBODY, f"all {done} files have run", spent


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """Check a commit out into a temporary folder, and remove it at the end."""
    git = ["git", "-C", str(LIST.parent), "worktree"]
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        tree = Path(folder).resolve() / "tree"
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def read(results: Path) -> dict[str, dict[str, str]]:
    """Return the last row of each fault."""
    return {row["fault"]: row for row in csv.DictReader(text_of(results).splitlines())}


def main(
    at: Annotated[str, Option(help="the commit whose library and tests are tried")] = "HEAD",
    results: Annotated[Path, Option(help="the table of results")] = Path("_build/faults.csv"),
    only: Annotated[str, Option(help="faults with this in their names")] = "",
    limit: Annotated[float, Option(help="seconds for the tests of one fault")] = 180,
    through: Annotated[str, Option(help="a command that pytest runs through, such as 'nice -n 15'")] = "",
    resume: Annotated[bool, Option(help="leave out faults that are decided")] = False,
    confirm: Annotated[bool, Option(help="run the tests that noticed faults once more, without any")] = False,
) -> None:
    """Plant the chosen faults one after the other, append a row for each to the results, and count all rows."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the fault and the worktree are removed
    results.parent.mkdir(parents=True, exist_ok=True)
    known = {name: row["status"] for name, row in read(results).items()} if resume else {}
    todo = [fault for fault in faults() if only in fault.name and known.get(fault.name, UNDECIDED) == UNDECIDED]
    # new ones first, and those mixed, so that a run that is cut short has tried every package
    todo.sort(key=lambda fault: (fault.name in known, crc32(fault.name.encode())))
    with worktree(at) as tree:
        graph = ImportGraph(tree)
        for number, fault in enumerate(todo, 1):
            status, by, seconds = noticed(fault, graph, limit, through)
            is_new = not results.exists()
            with results.open("a", newline="", encoding="utf-8") as file:
                rows = [(fault.name, status, by, round(seconds), fault.wrong)]
                csv.writer(file).writerows([COLUMNS, *rows] if is_new else rows)
            print(f"{number}/{len(todo)} {fault.name}: {status}, {by}, {seconds:.0f} s", flush=True)
        if confirm:
            names = sorted({row["by"] for row in read(results).values() if row["status"] == NOTICED})
            failed, _ = failures(names, tree, float("inf"), through)
            print(f"{len(failed)} of {len(names)} tests fail without a fault", *failed, sep="\n  ")
    for status in (NOTICED, NOBODY, UNDECIDED):
        those = [row for row in read(results).values() if row["status"] == status]
        print(f"{status}: {len(those)}")
        for row in those if status != NOTICED else ():
            print(f"  {row['fault']}: {row['wrong']} ({row['by']})")


if __name__ == "__main__":
    run(main)
