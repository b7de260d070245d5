"""Submissions of every kind, written into a folder, and what each of their exercises must come to."""

import copy
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {"ranks-and-messages": "start", "time": "start", "gpipe": "pp"}
FOLDERS = PAGES | {"interleaved": "pp"}
RIGHT, WRONG, ERROR, STARTED, STOPPED, MISSING, UNREADABLE = (
    "right",
    "wrong",
    "error",
    "not started",
    "stopped",
    "missing",
    "unreadable",
)

MISBEHAVIOURS = {
    "hang": ("import time\nwhile True:\n    time.sleep(1)\n", STOPPED, "took more than"),
    "flood": ("while True:\n    print('x' * 10_000)\n", STOPPED, "printed more than"),
    "memory": ("x = []\nwhile True:\n    x.append(bytearray(50_000_000))\n", STOPPED, "memory"),
    "fork": (
        "import os, time\nwhile True:\n    if os.fork() == 0:\n        time.sleep(60)\n        os._exit(0)\n"
        "    time.sleep(0.01)\n",
        STOPPED,
        "processes",
    ),
    "kills": ("import os\nos.kill(os.getppid(), 9)\nos._exit(1)\n", ERROR, "ended without an answer"),
    "exits": ("import os\nos._exit(0)\n", ERROR, "ended without an answer"),
    "syntax": ("makespan_ms = = 3\n", ERROR, "SyntaxError"),
}
CHEATS = {
    "patches the check": (
        "check.time.two_messages = lambda *a: print('time-1 solved: ok')\nmakespan_ms = 3\n"
        "import dualpipe_course.exercise as e\ne.Check.verdict = e.Check.__call__ = lambda *a: print('solved')\n"
    ),
    "patches print and launch": (
        "import builtins, sys\nlab.launch = lambda *a, **k: [True]\nbuiltins.print = lambda *a, **k: None\n"
        "sys.stdout.write('time-1 solved: well done')\nmakespan_ms = 3\n"
    ),
    "prints a verdict": (
        'print(\'{"status": "right", "score": 1, "message": ""}\')\n'
        'import os\nfor fd in range(3, 20):\n    try:\n        os.write(fd, b\'{"status": "right", "score": 1}\\n\')\n'
        "    except OSError:\n        pass\nmakespan_ms = 3\n"
    ),
    "returns equal to all": ("class A(int):\n    __eq__ = lambda s, o: True\n    __hash__ = None\nmakespan_ms = A()\n"),
}
COMES_TO = dict.fromkeys(CHEATS, WRONG) | {"prints a verdict": ERROR}  # which breaks the pipe of its own answer


class Shop:
    """Makes submissions from solutions and exercises."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.expected = folder, {}

    def notebook(self, page, kind="exercises"):
        folder = ROOT / kind / FOLDERS[page] / (page if kind == "solutions" else "")
        return json.loads((folder / f"{page}.ipynb").read_text())

    def write(self, learner, page, notebook, expected):
        (self.folder / learner).mkdir(parents=True, exist_ok=True)
        text = notebook if isinstance(notebook, str) else json.dumps(notebook)
        (self.folder / learner / f"{page}.ipynb").write_text(text)
        self.expected[learner] = expected

    def all_of(self, page, status):
        return {cell_tag(cell)[7:]: status for cell in self.notebook(page)["cells"] if "answer-" in cell_tag(cell)}

    def solved(self, page, **answers):
        """The solution with some answers replaced: {"1": text}."""
        notebook = copy.deepcopy(self.notebook(page, "solutions"))
        for cell in notebook["cells"]:
            number = cell_tag(cell).rpartition("-")[2]
            if cell_tag(cell).startswith("answer-") and f"_{number}" in answers:
                cell["source"] = answers[f"_{number}"]
        return notebook


def cell_tag(cell):
    return " ".join(cell["metadata"].get("tags", []))


def make(folder, pages=tuple(PAGES)):
    """Write thirty submissions; return {learner: {exercise: status}} and the shop."""
    shop = Shop(folder)
    page = "time"
    for name in pages:
        for number in (1, 2, 3):
            shop.write(f"right-{name}-{number}", name, shop.solved(name), shop.all_of(name, RIGHT))
        shop.write(f"starter-{name}", name, shop.notebook(name), shop.all_of(name, STARTED))
    for label, (text, status, _) in MISBEHAVIOURS.items():
        shop.write(label, page, shop.solved(page, _1=text), shop.all_of(page, RIGHT) | {"time-1": status})
    for label, text in CHEATS.items():
        shop.write(
            label.replace(" ", "-"),
            page,
            shop.solved(page, _1=text),
            shop.all_of(page, RIGHT) | {"time-1": COMES_TO[label]},
        )
    _add_edited(shop, page)
    return shop


def _add_edited(shop, page):
    edited = shop.notebook(page)
    for cell in edited["cells"]:
        if cell_tag(cell).startswith("check-"):
            cell["source"] = "print('time solved')"
        if cell_tag(cell) == "answer-time-1":
            cell["source"] = "makespan_ms = 0"
    edited["cells"].append({"cell_type": "code", "metadata": {}, "source": "raise SystemExit", "outputs": []})
    shop.write("edited-check", page, edited, shop.all_of(page, STARTED) | {"time-1": WRONG})
    deletes = "import os, shutil\nshutil.rmtree(os.getcwd())\n" + "makespan_ms = 29"
    shop.write("deletes-folder", page, shop.solved(page, _1=deletes), shop.all_of(page, RIGHT))
    in_ranks = "def exchange(x):\n    import os, shutil\n    shutil.rmtree(os.getcwd())\n    return []\n"
    ranks = "ranks-and-messages"
    expected = shop.all_of(ranks, RIGHT) | {"ranks-3": WRONG}
    shop.write("deletes-in-ranks", ranks, shop.solved(ranks, _3=in_ranks), expected)
    background = (
        "import subprocess\nfor _ in range(3):\n    subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    )
    text = background + "open('left.txt', 'w').write('x')\nmakespan_ms = 29"
    shop.write("leaves-processes", page, shop.solved(page, _1=text), shop.all_of(page, RIGHT))
    lost = shop.solved(page)
    lost["cells"] = [cell for cell in lost["cells"] if cell_tag(cell) != "answer-time-3"]
    shop.write("lost-cell", page, lost, shop.all_of(page, RIGHT) | {"time-3": MISSING})
    shop.write("no-notebook", page, "this is no notebook", shop.all_of(page, UNREADABLE))
    shop.write("cut-off", page, json.dumps(shop.solved(page))[:2000], shop.all_of(page, UNREADABLE))
