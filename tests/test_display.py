"""Notebooks: IPython shows a timeline and a plan as the drawing of `viz`, and reads the drawing code only then."""

import subprocess
import sys

import pytest

SHOWN = """
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
from dualpipe_lab import schedules, simulate
timeline = simulate(schedules.build("1f1b", num_ranks=2, num_microbatches=3))
assert not [name for name in sys.modules if name.startswith("dualpipe_lab.viz")]
data, _ = shell.display_formatter.format(timeline)
from dualpipe_lab.viz import timeline_html
assert data["text/html"] == timeline_html(timeline)
assert data["text/plain"] == repr(timeline)
from dualpipe_lab import Plan, viz
plan = Plan(pp=2, dp=2)
data, _ = shell.display_formatter.format(plan)
assert str(plan) in data["text/html"]
assert viz.grid(plan).to_svg() in data["text/html"]
"""
PLAIN = """
import sys
from dualpipe_lab import schedules, simulate
str(simulate(schedules.build("1f1b", num_ranks=2, num_microbatches=3)))
from dualpipe_lab import Plan
Plan(dp=2).topology.shape
assert not [name for name in sys.modules if name.startswith(("IPython", "dualpipe_lab.viz"))]
"""


@pytest.mark.parametrize("code", [SHOWN, PLAIN], ids=["in IPython", "without it"])
def test_timelines_and_plans_are_shown_as_drawings_where_ipython_runs(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
