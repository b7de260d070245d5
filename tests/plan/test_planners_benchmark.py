"""`benchmarks/planners.py`: answers of a process, arithmetic of errors, and rows as the other tests have them."""

import json
import math
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import _planner_answers as answers
import _planner_rows as rows
import planners

from dualpipe_course.whole.published import rivals, sizes_of

PLACE = Path(planners.__file__).parent
FAKE = """
import json, os, sys
print("what a tool prints by the way")
found = [row["value"] if "value" in row else "no gate; no heads" for row in json.load(sys.stdin)]
assert "PYTHONPATH" not in os.environ and sys.argv[1].endswith("checkout")
print(json.dumps(found))
"""


def row(name, published, machine="", **fields):
    return rows.Row("B200 steps", name, fields.pop("inputs", {}), published, lambda: 0.0, machine=machine, **fields)


@pytest.fixture
def tool(tmp_path, monkeypatch):
    def ask(text, some):
        script = tmp_path / "script.py"
        script.write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return answers.ask(script, tmp_path / "checkout", sys.executable, some)

    return ask


def test_a_tool_answers_with_numbers_or_reasons(tool):
    some = [row("one", 2.0, inputs={"value": 1}), row("other", 3.0)]
    found = tool(FAKE, some)
    assert found == {("B200 steps", "one"): 1.0, ("B200 steps", "other"): "no gate; no heads"}
    summary = answers.summary(some, found)
    assert (summary.count, summary.total, summary.median, summary.worst) == (1, 2, 0.5, -0.5)
    assert summary.reasons == Counter({"no gate": 1, "no heads": 1})


def test_a_tool_without_a_folder_is_not_run():
    found = answers.ask(PLACE / "_ask_calculon.py", None, sys.executable, [row("one", 2.0)])
    assert found == {("B200 steps", "one"): answers.NOT_RUN}
    summary = answers.summary([row("one", 2.0)], found)
    assert (summary.count, math.isnan(summary.median), summary.reasons["not run"]) == (0, True, 1)


def test_a_script_that_fails_or_miscounts_is_an_error(tool):
    with pytest.raises(RuntimeError, match="no such tool"):
        tool("raise SystemExit('no such tool')", [row("one", 2.0)])
    with pytest.raises(ValueError, match="got 2 answers to 1 rows"):
        tool("print('[1, 2]')", [row("one", 2.0)])


def test_a_factor_is_that_of_one_row_of_the_machine_which_counts_for_nothing():
    some = [
        row("a", 10.0, "a100", gives=True, is_used=True), row("b", 20.0, "a100"), row("c", 30.0, "a100"),
        row("d", 1.0, "h100"), row("e", 1.0, "a100", is_used=True),
    ]  # fmt: skip
    found = {("B200 steps", name): value for name, value in zip("abcde", (5.0, 8.0, 18.0, 1.0, 7.0), strict=True)}
    assert answers.factors(some, found) == {"a100": 2.0}
    plain, scaled = answers.summary(some, found), answers.summary(some, found, {"a100": 2.0})
    assert (plain.count, plain.worst) == (3, -0.6)
    assert (scaled.count, scaled.reasons["no factor"]) == (2, 1)
    assert (scaled.median, scaled.worst) == pytest.approx((0.2, -0.2))


def test_a_table_has_a_line_for_each_way_to_an_answer():
    some = [row("a", 10.0, "a100", gives=True, is_used=True), row("b", 20.0, "a100")]
    lines = [("fake", "as it comes", {("B200 steps", "a"): 5.0, ("B200 steps", "b"): 10.0})]
    found = [line for line in planners.summaries(some, lines) if line[0] == "B200 steps"]
    assert [(tool, how, one.worst) for _, tool, how, one in found] == [
        ("fake", "as it comes", -0.5), ("fake", "one factor", 0.0),
    ]  # fmt: skip
    assert planners.table(found).row_count == 2


def test_megatron_s_script_is_read_alone(tmp_path):
    """A stand-in: the total of three, and what a row lacks is refused."""
    folder = tmp_path / "megatron" / "training"
    folder.mkdir(parents=True)
    (folder / "theoretical_memory_usage.py").write_text(
        "from .utils import is_hybrid_model, print_rank_0\n"
        "def report_theoretical_memory(args, num_microbatches):\n"
        "    print_rank_0('by the way')\n"
        "    return 1024, 2048, args.num_layers * num_microbatches * 1024\n"
    )
    some = [one for one in rows.all_rows() if one.table in ("B200 peaks", "Korthikanti activations", "MLPerf steps")]
    found = answers.ask(PLACE / "_ask_megatron.py", tmp_path, sys.executable, some)
    for one in some:
        answer, inputs = found[answers.key(one)], one.inputs
        if one.table == "MLPerf steps":
            assert answer == "no estimate of time; no context parallelism"
        elif inputs["cp"] > 1:
            assert answer == "no context parallelism"
        else:
            assert answer == (2.0 if inputs["wanted"] == "activations" else inputs["layers"] * inputs["microbatches"])


def test_every_row_has_a_name_of_its_own_and_inputs_for_another_process():
    found = rows.all_rows()
    assert Counter(one.table for one in found) == dict(zip(rows.TABLES, (15, 31, 6, 8, 8, 13), strict=True))
    assert len({answers.key(one) for one in found}) == len(found)
    assert len({tuple(one.inputs) for one in found}) == 1
    json.dumps([one.inputs for one in found])
    for one in found:
        sizes = one.inputs
        assert sizes["ranks"] == sizes["pp"] * sizes["dp"] * sizes["tp"] * sizes["cp"], one.name
        assert sizes["batch"] == sizes["dp"] * sizes["microbatches"] * sizes["rows"], one.name


def test_the_paper_s_activations_are_those_of_its_formulas():
    for one in rows.paper_activations():
        if one.name.startswith(("22B", "175B")):
            assert one.ours() == pytest.approx(one.published, rel=1e-6)


def test_stored_answers_have_the_rows_of_the_benchmark():
    for table in rivals.TABLES:
        some = [one for one in rows.all_rows() if one.table == table]
        expected = [(one.published, one.gives, one.is_used) for one in some]
        assert [(one.published, one.gives, one.is_used) for one in rivals.rows(table)] == expected
        for found in rivals.ANSWERS.values():
            assert len(found.get(table, some)) == len(some)
    with pytest.raises(ValueError, match=r"a table is one of .*, got 'MLPerf steps'"):
        rivals.rows("MLPerf steps")


def test_our_stored_steps_are_those_of_the_library():
    """Those of its two smaller models, and one step of a larger one: each of the others takes 6 s."""
    kept = rivals.ANSWERS["dualpipe-lab"]["Korthikanti steps"]
    for one, seconds in list(zip(rows.paper_steps(), kept, strict=True))[:5]:
        assert one.ours() == pytest.approx(seconds, rel=1e-5)


def test_stored_answers_have_the_errors_of_the_benchmark_s_arithmetic():
    some = [one for one in rows.all_rows() if one.table == "B200 steps"]
    found = dict(zip(map(answers.key, some), rivals.ANSWERS["SimuMax"]["B200 steps"], strict=True))
    for factors in (None, answers.factors(some, found)):
        summary = answers.summary(some, found, factors)
        pairs = rivals.pairs("B200 steps", list(found.values()), one_factor=factors is not None)
        assert sizes_of(pairs) == pytest.approx((summary.count, summary.median, abs(summary.worst)))


def test_other_answers_than_the_stored_ones_are_named():
    some = [one for one in rows.all_rows() if one.table == "Korthikanti steps"]
    kept = rivals.ANSWERS["calculon"]["Korthikanti steps"]
    same = dict(zip(map(answers.key, some), kept, strict=True))
    assert planners.beside_stored("calculon", some, same) == "8 answers are the stored ones, 0 are not"
    other = same | {answers.key(some[0]): 2.0, answers.key(some[1]): "no file"}
    head, *lines = planners.beside_stored("calculon", some, other).splitlines()
    assert head == "6 answers are the stored ones, 2 are not"
    assert [line.split(": ")[-1] for line in lines] == [f"2.0, stored {kept[0]}", f"no file, stored {kept[1]}"]
