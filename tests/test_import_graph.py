"""The import graph of the library, lazy imports and those for types too: no cycle, and `viz` stands on top.

And what a statement loads; a time would depend on the machine, the set of modules does not.
"""

import ast
import json
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BELOW_VIZ = ("timeline", "topology", "pp", "cp", "dp", "tp", "ep", "comm", "launch", "models", "plan")


def modules(package="dualpipe_lab"):
    """Name -> file of every module of a package."""
    files = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        files[name.removesuffix(".__init__")] = path
    return files


def imports_of(source, known):
    """The modules of the library that a source names in any import statement, wherever it stands."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found.add(submodule if submodule in known else node.module)
    return found & set(known)


def graph_of(package):
    files = modules(package)
    return {name: imports_of(path.read_text(), files) - {name} for name, path in files.items()}


@pytest.fixture(scope="module")
def graph():
    return graph_of("dualpipe_lab")


def test_every_form_of_import_is_seen():
    source = """
from typing import TYPE_CHECKING
import a.one
from a import two
if TYPE_CHECKING:
    from a.three import Name
def later():
    from a import four
"""
    assert imports_of(source, {"a": 0, "a.one": 0, "a.two": 0, "a.three": 0, "a.four": 0}) == {
        "a.one",
        "a.two",
        "a.three",
        "a.four",
    }


@pytest.mark.parametrize(("package", "fewer"), [("dualpipe_lab", 150), ("dualpipe_course", 100), ("dualpipe_ours", 28)])
def test_no_modules_import_each_other_in_a_cycle(package, fewer):
    graph = graph_of(package)
    assert len(graph) > fewer
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_nothing_below_viz_imports_it(graph):
    below = [name for name in graph if name.split(".")[1:2] and name.split(".")[1] in BELOW_VIZ]
    upwards = {name: found for name in below if (found := {n for n in graph[name] if n.startswith("dualpipe_lab.viz")})}
    assert len(below) > 100
    assert upwards == {}


def test_no_module_below_viz_names_it_in_a_text():
    """`import_module("dualpipe_lab.viz")` would hide an import from the graph."""
    files = {name: path for name, path in modules().items() if name.split(".")[1:2] and name.split(".")[1] in BELOW_VIZ}
    texts = {
        name: [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        for name, path in files.items()
    }
    assert [
        name for name, found in texts.items() if any(str(text).startswith("dualpipe_lab.viz") for text in found)
    ] == []


HEAVY = {"torch", "numpy", "matplotlib", "transformers", "IPython", "pydantic", "dualpipe_lab.viz"}
LATER = HEAVY | {  # needed by a call of plans at most, and seen in the time of their import
    "multiprocessing", "socket", "pathlib", "json", "html", "fractions", "decimal", "dualpipe_lab.timeline",
    "dualpipe_lab.pp.schedules", "dualpipe_lab.models.stage_rules", "dualpipe_lab.plan.traffic",
    "dualpipe_lab.plan.rules", "dualpipe_lab.plan.estimate", "dualpipe_lab.plan.fits", "dualpipe_lab.plan.model_of",
    "dualpipe_lab.plan.saved_activations", "dualpipe_lab.launch.record",
}  # fmt: skip
PLANS = """from dualpipe_lab.plan import Plan, estimate, known_models, memory, model_of
Plan(pp=2, num_microbatches=2).program
[model_of(name).layer_costs for name in known_models()]
plan = Plan(dp=8, zero=1, precision="bfloat16")
plan.check(model_of("deepseek-v3"), 4096)
memory(model_of("llama3-8b"), plan, 8192, 8).largest, estimate(model_of("llama3-8b"), plan, 8192, 8).point"""
LOADS = {  # statements, and what they do not load
    "import dualpipe_lab.plan": LATER,
    "from dualpipe_lab.plan import H100, Plan, memory": LATER,
    PLANS: {"torch", "numpy", "transformers"},
    "import dualpipe_lab as lab; from dualpipe_lab import cp, dp, ep, models, pp, tp, viz": {"torch"},
    "from dualpipe_lab import dp, pp; pp.simulate(pp.schedules.gpipe(2, 2)), pp.closed_forms.gpipe_makespan; dp.Layout":
    {"torch", "matplotlib", "numpy"},
    "from dualpipe_lab import Plan, pp; str(pp.simulate(pp.schedules.gpipe(2, 2))), str(Plan(dp=2).topology)":
    {"IPython", "dualpipe_lab.viz"},
    "import dualpipe_lab.data": {"torch", "numpy"},
}  # fmt: skip


def loaded_by(statements):
    text = f"import sys, os; before = set(sys.modules)\n{statements}\nnames = sorted(set(sys.modules) - before)\n"
    text += "import json; print(json.dumps(names))"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_statements_load_nothing_heavy(subtests):
    for statements, unwanted in LOADS.items():
        with subtests.test(statements=statements):
            loaded = loaded_by(statements)
            assert not unwanted & loaded
            assert unwanted != LATER or len(loaded) < 120
    assert "dualpipe_lab.timeline" in loaded_by("import dualpipe_lab.timeline"), "a heavy import is seen"
