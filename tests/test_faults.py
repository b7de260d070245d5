"""The list of faults in tools/faults.toml does not rot: each has its line in the library of today."""

import ast
from pathlib import Path

from scripts import load

ROOT = Path(__file__).parents[1]
faults = load(ROOT / "tools" / "faults.py")


def test_every_fault_finds_one_line_and_leaves_python():
    found = [(*fault.find(ROOT), fault.new) for fault in faults.faults()]
    assert len({place[:2] for place in found}) == len(found) >= 60
    for path, place, wrong in found:
        lines = path.read_text().splitlines()
        right = lines[place].split("  # ")[0]
        lines[place] = right.replace(right.strip(), wrong)
        assert lines[place] != right
        ast.parse("\n".join(lines))


def test_a_file_of_the_library_is_known_by_its_nearest_tests():
    graph = faults.ImportGraph(ROOT)
    assert "tests/dp/test_adam.py" in graph.tests_of(ROOT / "dualpipe_lab/dp/adam.py")[:6]  # which says `dp.adamw_`
