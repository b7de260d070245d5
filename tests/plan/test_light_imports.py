"""What an import of plans loads: no torch, no numpy, and none of the modules that only a call needs.

A time would depend on the machine; the set of modules does not.  Measured beside it: 20 ms for an empty interpreter,
and less than 0.1 s of CPU for the imports below.
"""

import json
import subprocess
import sys

import pytest

IMPORTS = ("import dualpipe_lab.plan", "from dualpipe_lab.plan import H100, Plan, memory")
HEAVY = ("torch", "numpy", "matplotlib", "transformers", "IPython", "pydantic")
# each is needed by a call at most, and its import is seen in the time
LATER = (
    "multiprocessing", "socket", "pathlib", "json", "html", "fractions", "decimal", "dualpipe_lab.timeline",
    "dualpipe_lab.pp.schedules", "dualpipe_lab.models.stage_rules", "dualpipe_lab.plan.traffic",
    "dualpipe_lab.plan.rules", "dualpipe_lab.plan.estimate", "dualpipe_lab.plan.fits", "dualpipe_lab.plan.kept",
    "dualpipe_lab.plan.model_of",
    "dualpipe_lab.launch.record", "dualpipe_lab.viz",
)  # fmt: skip


def loaded_by(statement):
    text = f"import sys, os; before = set(sys.modules)\n{statement}\nnames = sorted(set(sys.modules) - before)\n"
    text += "import json; print(json.dumps(names))"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("statement", IMPORTS)
def test_an_import_loads_nothing_heavy(statement):
    loaded = loaded_by(statement)
    roots = {name.partition(".")[0] for name in loaded}
    assert not roots & set(HEAVY)
    assert not [name for name in loaded if name in LATER]
    assert len(loaded) < 120


def test_a_heavy_import_is_seen():
    assert "dualpipe_lab.timeline" in loaded_by("import dualpipe_lab.timeline")


def test_what_is_lazy_is_loaded_by_its_call_and_no_call_needs_torch():
    """Programs, published models, memory and seconds are pure data."""
    calls = """
from dualpipe_lab.plan import Plan, estimate, known_models, memory, model_of, num_parameters
Plan(pp=2, num_microbatches=2).program
for name in known_models():
    num_parameters(model_of(name))
plan = Plan(dp=8, zero=1, precision="bfloat16")
plan.check(model_of("deepseek-v3"), 4096)
memory(model_of("llama3-8b"), plan, 8192, 8).largest, estimate(model_of("llama3-8b"), plan, 8192, 8).point
"""
    loaded = loaded_by(calls)
    assert "dualpipe_lab.pp.schedules" in loaded
    assert not {"torch", "numpy", "transformers"} & set(loaded)
