"""Try the library where only the wheel and what it requires is installed: import, ranks, simulator, CLI, a picture.

Run with the Python of that environment, outside of the repository: `python smoke.py`.  The last line says `smoke: ok`.
"""

import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import dualpipe_lab as lab
from dualpipe_lab import cp, dp, ep, models, pp, tp, viz

EXTRAS = {"matplotlib": "notebook", "anywidget": "notebook", "psutil": "grading"}


def total(rank: int, world_size: int) -> float:
    """Sum the ranks' numbers."""
    import torch

    x = torch.tensor([rank + 1.0])
    lab.comm.all_reduce(x)
    return float(x)


def say(what: str, result: object) -> None:
    """Print one line of the protocol."""
    print(f"smoke: {what}: {result}", flush=True)


def refusal(call: str) -> str:
    """Return the message of a call that needs an extra."""
    try:
        exec(call, {"lab": lab, "viz": viz, "timeline": lab.simulate(lab.schedules.gpipe(2, 2))})
    except ImportError as error:
        return str(error)
    raise AssertionError(f"{call} works, although its extra is not installed")


def main() -> None:
    """Go through the library once."""
    say("from", Path(lab.__file__).parent)
    assert "site-packages" in lab.__file__, "this is not the installed library"
    names = sum(len(part.__all__) for part in (lab, dp, tp, cp, pp, ep, models))
    for part in (lab, dp, tp, cp, pp, ep, models):
        for name in part.__all__:
            getattr(part, name)
    say("public names", names)
    assert "Timelines" in viz.__doc__
    assert lab.launch(total, 2) == [3.0, 3.0]
    say("launch", "two ranks agree")
    timeline = lab.simulate(lab.schedules.build("dualpipe", 4, 8))
    assert timeline.makespan == lab.simulate(lab.schedules.dualpipe(4, 8)).makespan
    say("simulate", f"{timeline.name}, {timeline.makespan} ticks")
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "dualpipe.svg"
        picture.write_text(timeline.to_svg(), encoding="utf-8")
        assert picture.read_text().startswith("<svg")
        command = [str(Path(sys.executable).parent / "dualpipe-lab"), "show", "gpipe", "--ranks", "2", "--microbatches"]
        shown = subprocess.run([*command, "2"], capture_output=True, text=True, check=True, cwd=folder)
        assert "0F0" in shown.stdout or "makespan" in shown.stdout, shown.stdout
    say("picture and command line", "drawn")
    calls = {"matplotlib": "viz.plot_timelines(timeline)", "anywidget": "viz.play('gpipe').widget"}
    calls["psutil"] = "from dualpipe_course.grading.grader import Grader"
    for package, name in EXTRAS.items():
        if find_spec(package) is None:
            assert refusal(calls[package]).endswith(f'run: pip install "dualpipe-lab[{name}]"')
            say(f"without {package}", f"the extra [{name}] is named")
    say("ok", sys.version.split()[0])


if __name__ == "__main__":
    main()
