"""The learner's trainer as a repository of its own, which needs torch alone: `dualpipe-lab export mine FOLDER`.

In: the learner's parts, and the course's for those that are missing.  Out: a folder with the parts, messages over
torch.distributed, the four runs for torchrun, tests, and a README with a column to fill.
"""

import json
import re
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from dualpipe_course.own import finder, folder
from dualpipe_course.own.parts import PARTS
from dualpipe_lab.pp import closed_forms, schedules
from dualpipe_lab.pp.simulator import simulate

FILES = ("run.py", "test_mine.py")
ROWS = {
    "rows_gpipe.gpipe_rows": ("gpipe", ((1, 1), (2, 3), (4, 8))),
    "rows_1f1b.one_f_one_b_rows": ("1f1b", ((1, 2), (3, 4), (4, 3), (4, 8))),
    "rows_zb_h1.zb_h1_rows": ("zero_bubble_h1", ((1, 2), (3, 4), (4, 8))),
    "rows_dualpipe.dualpipe_rows": ("dualpipe", ((2, 4), (4, 8), (4, 12))),
    "rows_dualpipev.dualpipev_rows": ("dualpipev", ((1, 2), (2, 4), (3, 7))),
}


def export(mine: Path | None, out: Path) -> list[str]:
    """Write the repository; return the names of the parts that are the learner's.

    Raises:
        ValueError: the folder holds something else.
    """
    if out.exists() and any(out.iterdir()) and not (out / "mine" / "comm.py").is_file():
        raise ValueError(f"{out} holds something else: name an empty folder, or one that was exported before")
    own = [part for part in PARTS if mine is not None and folder.state(part, mine) == "own"]
    texts = {part: finder.official(part) for part in PARTS}
    texts |= {part: (mine / f"{part}.py").read_text(encoding="utf-8") for part in own if mine}
    here = files("dualpipe_course.own")
    written = {f"mine/{part}.py": standing_alone(text) for part, text in texts.items()}
    written |= {"mine/__init__.py": '"""A trainer in parts."""\n', "mine/comm.py": _text(here, "exported/comm.py")}
    written |= {name: _text(here, f"exported/{name}") for name in FILES}
    written["trainings.py"] = standing_alone(_text(here, "trainings.py"))
    written["plain_model.py"] = finder.official("plain_model")
    written["rows.json"] = json.dumps({name: _rows(*what) for name, what in ROWS.items()}, indent=1) + "\n"
    written["README.md"] = _readme(_text(here, "exported/README.md"), own)
    for name, text in written.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text, encoding="utf-8")
    return own


def standing_alone(text: str) -> str:
    r"""A text with imports of what lies beside it in place of the course's.

    >>> standing_alone("from dualpipe_lab.comm import isend\nfrom .ring import pass_on\n")
    'from mine.comm import isend\nfrom mine.ring import pass_on\n'
    """
    text = re.sub(r"\bdualpipe_lab\.comm\b", "mine.comm", text)
    text = re.sub(r"^from dualpipe_lab import comm\b", "from mine import comm", text, flags=re.MULTILINE)
    text = re.sub(r"^from \.(\w+) import", r"from mine.\1 import", text, flags=re.MULTILINE)
    return text.replace("dualpipe_ours.plain_model", "plain_model")


def _text(here: Traversable, name: str) -> str:
    return here.joinpath(name).read_text(encoding="utf-8")


def _rows(name: str, sizes: tuple[tuple[int, int], ...]) -> dict[str, list[str]]:
    programs = {f"{p},{m}": schedules.build(name, p, m) for p, m in sizes}
    return {size: [" ".join(map(str, row)) for row in program.ranks] for size, program in programs.items()}


def _readme(text: str, own: list[str]) -> str:
    words = f"Mine are {', '.join(own) or 'none yet'}; the others are DualPipe Lab's."
    lines = []
    for name, num, formula, idle in (
        ("gpipe", 8, "(p - 1) (F + B)", closed_forms.gpipe_makespan(4, 8) - 3 * 8),
        ("1f1b", 8, "(p - 1) (F + B)", closed_forms.one_f_one_b_makespan(4, 8) - 3 * 8),
        ("zero_bubble_h1", 8, "(p - 1) (F + I - W)", closed_forms.zero_bubble_h1_makespan(4, 8) - 3 * 8),
        ("dualpipe", 16, "(p / 2 - 1) (F&B + B - 3 W)", closed_forms.dualpipe_bubble(4, 16, 0)),
    ):
        derived = idle / (3 * num + idle)
        found = simulate(schedules.build(name, 4, num)).bubble_fraction
        lines.append(f"| {name} | {formula} is {idle} of {3 * num + idle} ticks, {derived:.1%} | {found:.1%} | |")
    words = "All are mine." if len(own) == len(PARTS) else words
    return text.format(num=len(PARTS), words=words, order=", ".join(PARTS), table="\n".join(lines))
