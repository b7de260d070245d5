"""The command line: what it prints and writes."""

import csv
import io
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from fractions import Fraction

import pytest
from shell import output, run, table

from dualpipe_lab import Cost, schedules, simulate, viz
from dualpipe_lab.cli.inputs import CsvFile, read_cost, split, wanted, whole_ticks
from dualpipe_lab.plan import fits, model_of
from dualpipe_lab.pp.explain import explain
from dualpipe_lab.pp.ranking import score, stage_cost
from dualpipe_lab.pp.torch_csv import from_torch_csv, to_torch_csv


def test_show_prints_a_timeline_that_fits_and_the_lines_that_a_program_needs():
    """Everything else that it prints is on the page of the command line, to the letter."""
    timeline = simulate(schedules.build("dualpipe", 8, 20), Cost(overlap=Fraction(5, 2)))
    for columns in (60, 100, 200):
        text = output("show", "dualpipe", "--ranks", 8, "--microbatches", 20, "--cost", "FB=2.5", columns=columns)
        assert text.startswith(timeline.to_text(columns))
        assert all(len(line) <= columns for line in text.splitlines() if line.startswith("rank "))
    assert "weights        2 of 8 stages on a rank" in text
    plain, split, folded = (output("show", name) for name in ("1f1b", "zero_bubble_h1", "dualpipev"))
    assert "waiting W      1 to 4 at most on a rank" in split
    assert "in compare     27 ticks, 4.5 activations, 1 of the weights" in folded
    assert not any(words in plain for words in ("waiting W", "in compare"))


def test_show_writes_every_form_and_says_which(tmp_path):
    forms = ("svg", "png", "html", "csv", "perfetto")
    files = {form: tmp_path / f"timeline.{form}" for form in forms}
    flags = [word for form, file in files.items() for word in (f"--{form}", file)]
    text = output("show", "dualpipev", "--ranks", 2, "--microbatches", 4, "--cost", "F=1.5", *flags)
    assert text.splitlines() == [f"wrote {file} ({file.stat().st_size:,} bytes)" for file in files.values()]
    program = schedules.build("dualpipev", 2, 4)
    timeline = simulate(program, Cost(F=Fraction(3, 2)))
    assert files["svg"].read_text() == timeline.to_svg()
    assert files["perfetto"].read_text() == timeline.to_perfetto()
    assert files["png"].read_bytes() == viz.timeline_png(timeline)
    assert files["csv"].read_text() == to_torch_csv(program)
    ET.fromstring(files["svg"].read_text())
    page = files["html"].read_text()
    assert page.startswith("<!doctype html>")
    spec = json.loads(page.split("data-spec='")[1].split("'>")[0].replace("&#39;", "'").replace("&amp;", "&"))
    track = spec["tracks"][0]
    assert track["name"] == "DualPipeV, ticks of 1/2"
    assert (track["costs"]["F"], track["costs"]["I"]) == (3, 2)  # whole numbers, so that the page's sliders work


def test_a_written_program_is_shown_compared_and_explained(tmp_path):
    file = tmp_path / "mine.csv"
    output("show", "dualpipev", "--csv", file)
    assert from_torch_csv(file) == schedules.build("dualpipev", 4, 8)
    assert output("show", file).splitlines()[1:] == output("show", "dualpipev").splitlines()[1:]
    assert "mine" in output("compare", "1f1b", file)
    told = explain(schedules.build("dualpipev", 4, 8), Cost(latency=1))
    assert output("explain", file, "--cost", "latency=1") == f"{told}\n".replace("DualPipeV", "mine")
    assert output("explain", "dualpipev", "--cost", "latency=1") == f"{told}\n"


def test_compare_ranks_with_the_costs_of_a_rank_s_share():
    names = ("gpipe", "1f1b", "dualpipe", "dualpipev")
    text = output("compare", *names, "--ranks", 4, "--microbatches", 10, "--cost", "I=2,FB=3.5,latency=0.5")
    cost = Cost(I=2, overlap=Fraction(7, 2), latency=Fraction(1, 2))
    scores = [score(schedules.build(name, 4, 10), cost) for name in names]
    rows = table(text)
    assert list(rows) == [one.name for one in sorted(scores, key=lambda one: (one.makespan, one.peak))]
    for one in scores:
        found = rows[one.name]
        assert Fraction(found[0]) == pytest.approx(float(one.makespan), abs=5e-4)
        assert found[1] == f"{one.bubble:.1%}"
        counts = [one.window, one.local_bubble, one.peak, one.weights, one.pairs, one.messages]
        assert [float(word) for word in found[2:]] == counts
    assert "overlapped pairs: for all that have them" in text
    assert "1f1b: it has no pairs; paired_1f1b has" in text


def test_compare_has_one_rule_about_pairs_for_all():
    sizes = ("--ranks", 4, "--microbatches", 8)
    with_pairs, without = (table(output("compare", *sizes, *more)) for more in (("--cost", "FB=2.5"), ()))
    assert {"Paired 1F1B", "DualPipe"} <= with_pairs.keys()
    assert "1F1B" not in with_pairs
    assert {"1F1B", "DualPipe"} <= without.keys()
    assert not any(name.startswith("Paired") for name in without)
    text = output("compare", *sizes, "--cost", "FB=2.5", "--no-pairs")
    assert table(text) == without
    assert "overlapped pairs: none, a pair takes F and then B" in text
    assert "FB=" not in text


def test_compare_puts_what_exceeds_the_memory_last_and_names_what_has_not_this_size():
    text = output("compare", "gpipe", "1f1b", "dualpipe", "--ranks", 5, "--memory", 5)
    rows = table(text)
    assert list(rows) == ["1F1B", "GPipe"]
    assert rows["GPipe"][4:7] == ["8", ">", "limit"]
    assert "dualpipe: dualpipe needs an even number of ranks, got 5" in text


def test_compare_leaves_asynchronous_schedules_out_unless_they_are_named():
    assert "PipeDream" not in output("compare")
    text = output("compare", "pipedream", "1f1b")
    assert "pipedream: it updates the weights between microbatches, so it computes another gradient" in text
    assert "1f1b:" not in text


def test_two_smaller_stages_a_rank_cost_half_each():
    program = schedules.build("dualpipev", 4, 8)
    assert stage_cost(program, Cost(F=1, I=2, B=5, overlap=4, latency=3)) == Cost(
        F=Fraction(1, 2), I=1, W=Fraction(1, 2), B=Fraction(5, 2), overlap=2, latency=3
    )
    assert score(program)[1:] == (27, pytest.approx(1 / 9), 27, 3, Fraction(9, 2), 96, 1, 25)
    with pytest.raises(ValueError, match=r"Cost.F is not; use simulate instead"):
        stage_cost(program, Cost(F=[1] * 8))


def test_options_of_a_builder_are_passed_to_those_that_have_them():
    text = output("show", "interleaved", "--virtual-stages", 3, "--ranks", 2, "--microbatches", 2)
    assert "2 ranks, 6 stages, 2 microbatches" in text
    assert "2 ranks, 6 stages" in output("show", "--virtual-stages=3", "interleaved", "--ranks", 2)
    asked = ("interleaved:num_virtual_stages=4", "--virtual-stages", 3, "interleaved", "1f1b")
    rows = table(output("compare", *asked, "--ranks", 2))
    assert set(rows) == {"1F1B", *(f"Interleaved 1F1B ({number} virtual stages)" for number in (3, 4))}


def test_costs_are_read_exactly():
    assert read_cost("F=0.1,I=0.2,W=3e-1") == Cost(F=Fraction(1, 10), I=Fraction(1, 5), W=Fraction(3, 10))
    assert read_cost(None) == read_cost("") == Cost()
    assert whole_ticks(read_cost("F=0.1,I=0.25,transfer=1")) == (Cost(F=2, I=5, W=20, transfer=20), 20)


def test_names_options_and_files_are_told_apart():
    assert wanted("some:where.csv") == CsvFile("some:where.csv")
    with pytest.raises(ValueError, match="leave --virtual-stages out"):
        wanted("some.csv").with_options({"virtual_stages": 2})
    assert split(["--a=1", "x", "-b", "-2"]) == (["x"], {"a": 1, "b": -2})


def test_the_program_starts_as_a_module_and_leaves_torch_alone(tmp_path):
    script = """
import sys
import dualpipe_lab.cli.app as cli

sys.argv[1:] = {}
try:
    cli.main()
finally:
    print("torch" in sys.modules)
"""
    words = ["show", "1f1b", "--csv", str(tmp_path / "x.csv"), "--html", str(tmp_path / "x.html")]
    commands = ["-c", script.format(words)], ["-m", "dualpipe_lab", "compare", "gpipe", "1f1b"]
    for_torch, as_module = (
        subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True, timeout=60).stdout
        for command in commands
    )
    assert for_torch.splitlines()[-1] == "False"
    assert table(as_module)["1F1B"][0] == "33"
    assert len(list(csv.reader(io.StringIO((tmp_path / "x.csv").read_text())))) == 4


def test_the_plans_that_fit_are_printed_as_a_table():
    sizes = ("--gpus", 4, "--global-batch", 16, "--sequence-length", 2048)
    expected = fits(model_of("llama3.2-1b"), 4, 40e9, sequence_length=2048, global_batch=16, count=3)
    assert output("plan", "llama3.2-1b", *sizes, "--memory", 40, "--count", 3).rstrip("\n") == str(expected)
    assert len(expected) == 3


def test_help_names_every_command():
    text = output("--help")
    names = ("show", "compare", "explain", "plan", "convert", "grade", "graft", "progress")
    assert all(f"│ {name} " in text for name in names)
    assert run().exit_code == 2


def test_convert_goes_there_and_back_and_says_what_it_wrote(tmp_path):
    torch = pytest.importorskip("torch")
    from dualpipe_lab import models

    model = models.PlainLlama(models.LlamaConfig(hidden_size=16, ffn_size=24, num_heads=2, num_kv_heads=2))
    models.save_pretrained(model, tmp_path / "first")
    size = sum(parameter.nbytes for parameter in model.parameters())
    text = output("convert", tmp_path / "first", tmp_path / "ours", "--to", "checkpoint")
    assert text.splitlines() == [
        f"published -> checkpoint: 21 tensors, {size:,} bytes",
        f"wrote {tmp_path / 'ours' / 'step-00000000'}",
    ]
    text = output("convert", tmp_path / "ours", tmp_path / "half", "--to", "published", "--dtype", "bfloat16")
    assert text.splitlines()[0] == f"checkpoint -> published: 21 tensors, {size // 2:,} bytes"
    assert torch.equal(
        models.PretrainedFolder(tmp_path / "half").read("model.norm.weight"), model.norm.weight.detach().bfloat16()
    )
