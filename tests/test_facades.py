"""The doors of the library: what each part hands out, and that nobody outside goes through another one."""

import ast
import importlib
import pickle
import re
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest

from dualpipe_lab._facade import Facade, first_sentence, public_names

ROOT = Path(__file__).parents[1]
STUBS = sorted((ROOT / "dualpipe_lab").rglob("__init__.pyi"))
FACADES = [".".join(stub.relative_to(ROOT).parts[:-1]) for stub in STUBS]
DOORS = {
    *FACADES,
    "dualpipe_lab.comm",
    "dualpipe_lab.pp.schedules",
    "dualpipe_lab.pp.closed_forms",
    "dualpipe_lab.data",
}
OUTSIDE = [file for folder in ("book", "solutions", "exercises") for file in sorted((ROOT / folder).rglob("*.md"))]
OUTSIDE += [*sorted((ROOT / "benchmarks").glob("*.py")), ROOT / "README.md"]
IMPORT = re.compile(r"^[ \t]*(?:from (dualpipe_lab[\w.]*) import|import (dualpipe_lab[\w.]+))", re.MULTILINE)


def deeper_imports(text):
    return [found for match in IMPORT.finditer(text) if (found := match[1] or match[2]) not in DOORS]


def test_pages_and_benchmarks_import_from_facades():
    wrong = {}
    for file in OUTSIDE:
        path = file.relative_to(ROOT).as_posix()
        found = deeper_imports(file.read_text())
        wrong |= {path: found} if found else {}
    assert wrong == {}


def test_every_name_of_a_stub_exists_once_and_has_a_sentence():
    for package in FACADES:
        module = importlib.import_module(package)
        entries = public_names(package)
        names = [entry.name for entry in entries]
        assert len(names) == len(set(names)), package
        assert names == module.__all__, package
        for entry in entries:
            value = getattr(module, entry.name)
            assert entry.heading, f"{package}.{entry.name} stands under no heading"
            if isinstance(value, type) or callable(value):
                assert first_sentence(value), f"{package}.{entry.name} has no docstring"


def test_a_stub_names_every_constant_of_its_package():
    """What `__init__.py` binds itself and the stub leaves out, type checkers would refuse."""
    for stub in STUBS:
        bound = {
            target.id
            for node in ast.parse(stub.with_suffix(".py").read_text()).body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        declared = {node.target.id for node in ast.parse(stub.read_text()).body if isinstance(node, ast.AnnAssign)}
        assert bound == declared, stub


def python(text):
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, cwd=ROOT, check=False)


def test_a_function_stays_when_its_submodule_is_imported_first():
    text = """
import dualpipe_lab.cp.softmax, dualpipe_lab.pp.explain
from dualpipe_lab import cp, pp
from dualpipe_lab.cp import softmax
import types
assert isinstance(cp.softmax, types.FunctionType) and softmax is cp.softmax
assert isinstance(pp.explain, types.FunctionType)
import dualpipe_lab.cp.online_softmax
assert isinstance(cp.online_softmax, types.FunctionType)
import dualpipe_lab.launch.server, dualpipe_lab as lab
from dualpipe_lab import launch
assert isinstance(lab.launch, types.FunctionType) and launch is lab.launch
from dualpipe_lab.launch import server
assert server.__name__ == "dualpipe_lab.launch.server"
"""
    done = python(text)
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_is_told_with_the_known_ones():
    dp = importlib.import_module("dualpipe_lab.dp")
    with pytest.raises(
        AttributeError, match=r"module 'dualpipe_lab\.dp' has no attribute 'Zero4'; it has .*Zero1, Zero2"
    ):
        _ = dp.Zero4
    assert not hasattr(dp, "__wrapped__")
    assert "Zero2" in dir(dp)


def test_a_facade_travels_by_name():
    dp = importlib.import_module("dualpipe_lab.dp")
    assert isinstance(dp, Facade)
    assert pickle.loads(cloudpickle.dumps(dp)) is dp


def test_type_checkers_know_the_names_and_refuse_others(tmp_path):
    page = tmp_path / "page.py"
    lines = ["import dualpipe_lab as lab", "from dualpipe_lab import dp, tp", "lab.simulate", "lab.simulat", "dp.Zero2"]
    page.write_text("\n".join([*lines, "tp.ColumnParallelLiner", "reveal_type(lab.simulate)"]) + "\n")
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(page)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    wrong = re.findall(r'page\.py:(\d+): error: .*? attribute "(\w+)"', done.stdout)
    assert wrong == [("4", "simulat"), ("6", "ColumnParallelLiner")], done.stdout + done.stderr
    assert "Timeline" in done.stdout


def test_a_name_that_has_moved_is_told_in_one_sentence():
    with pytest.raises(ImportError, match=r"dualpipe_lab\.checks has moved: write `from dualpipe_course import check`"):
        exec("from dualpipe_lab import checks as check")


def follow_the_help(rank, world_size, part, folder):
    """Run the indented lines of a part's docstring, in order, with what they say is given."""
    import torch
    from torch import nn

    import dualpipe_lab as lab

    def attention_inputs(ids):
        return ids[:, None, :, None].expand(1, 2, -1, 4).double().split(1, 1)[0], *(
            torch.ones(1, 1, 8, 4).double(),
        ) * 2

    torch.manual_seed(0)
    given = {
        "nn": nn,
        "rank": rank,
        "mesh": lab.Mesh(lab.Topology([(part, world_size)])),
        "model": nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8)),
        "every": [nn.Linear(8, 8) for _ in range(2)],
        "full": nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8)).state_dict(),
        "x": torch.randn(8, 8),
        "y": torch.randn(8, 8),
        "ids": torch.arange(16)[None],
        "loss_fn": nn.functional.mse_loss,
        "attention_inputs": attention_inputs,
        "folder": folder,
    } | {name: getattr(lab, name) for name in ("dp", "tp", "cp", "pp", "ep")}
    lines = [line[4:] for line in (getattr(lab, part).__doc__ or "").splitlines() if line.startswith("    ")]
    assert 5 <= len(lines) <= 10
    exec("\n".join(lines), given)


@pytest.mark.parametrize("part", ["dp", "tp", "cp", "pp", "ep"])
def test_what_a_part_says_to_call_runs(part, tmp_path):
    from dualpipe_lab import launch

    launch(follow_the_help, 2, part, str(tmp_path))
