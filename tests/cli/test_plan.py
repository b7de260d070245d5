"""`dualpipe-lab plan`: what it prints, exports and refuses."""

import json
import re
from dataclasses import replace

import pytest
from shell import output, run

from dualpipe_lab.plan import MEGATRON_TIME, Cluster, Plan, model_of, search, step_time
from dualpipe_lab.train import Calibration
from dualpipe_lab.train.calibration import Machine, Work, predict

SMALL = ("plan", "llama3.2-1b", "--gpus", 4, "--batch", 16, "--length", 2048, "--schedule", "1f1b")


def test_the_first_plans_are_printed_with_bars_and_reasons():
    text = output(*SMALL, "--tokens", "1e9", "--price", 2, "--count", 3)
    assert text.startswith("4 ranks, 4 per node, each on H100 SXM")
    assert "Seconds are assumed" in text
    seconds = [float(found) for found in re.findall(r"^\d\. ([\d.]+) s, MFU", text, re.MULTILINE)]
    assert len(seconds) == 3
    assert seconds == sorted(seconds)
    assert re.search(r"^ +0 \|[A-Z]+ *\| \d+ of 86 GB$", text, re.MULTILINE)
    assert "1e+09 tokens take" in text
    assert "Why others lost:" in text
    for letter in set(re.search(r"\|([A-Z]+) *\|", text)[1]):
        assert re.search(rf"\b{letter} [a-z]+", text)


def test_every_export_prints_what_the_framework_reads():
    assert "--tensor-model-parallel-size" in output(*SMALL, "--export", "megatron")
    text = output(*SMALL, "--export", "deepspeed")
    settings, _ = json.JSONDecoder().raw_decode(text)
    assert settings["train_batch_size"] == 16
    assert "parallelism" in output(*SMALL, "--export", "torchtitan")
    described, _ = json.JSONDecoder().raw_decode(output(*SMALL, "--export", "lab"))
    assert Plan.from_description(described).world_size == 4


def test_a_cluster_of_any_size_comes_from_a_file(tmp_path):
    Cluster.of("a100-40", 4, 2).to_file(tmp_path / "mine.json")
    assert output(*SMALL, "--cluster", tmp_path / "mine.json").startswith("4 ranks, 2 per node, each on A100 SXM 40 GB")
    wide = "plan", "llama3.2-1b", "--batch", 16, "--length", 2048, "--schedule", "1f1b", "--limit", 5
    text = output(*wide, "--gpus", 16, "--cluster", tmp_path / "mine.json")
    assert text.startswith("16 ranks, 2 per node, each on A100 SXM 40 GB")
    assert "stopped at its limit" in text
    assert "train.calibrate" not in text, "who gives a file has measured"
    few = output(*wide[:-1], 2, "--gpus", 4)
    assert re.findall(r"^(\d)\. ", few, re.MULTILINE) == ["1", "2"]
    assert "train.calibrate" in few
    text = output(*wide, "--gpus", 16, "--nodes-of", 8, "--cluster", tmp_path / "mine.json")
    assert text.startswith("16 ranks, 8 per node")
    refused = run(*wide, "--gpus", 3, "--cluster", tmp_path / "mine.json")
    assert refused.exit_code == 1
    assert "use 4 ranks" in refused.stderr


def test_of_plans_that_do_not_fit_the_nearest_is_named():
    found = run("plan", "llama3-70b", "--gpus", 4, "--batch", 16, "--length", 2048, "--schedule", "1f1b").stderr
    assert "no plan fits" in found
    searched = search(model_of("llama3-70b"), Cluster.of("h100", 4), 2048, 16, schedule_names=["1f1b"])
    sizes = [lost.num_bytes for lost in searched.lost if lost.num_bytes is not None]
    nearest = next(lost for lost in searched.lost if lost.num_bytes == min(sizes))
    assert f"{nearest.plan}: {nearest.reason}" in found


def calibrated(*precisions):
    """What a calibration finds on a machine that is as fast as the table's A100."""
    unit = Cluster.of("a100-80", 4).accelerator
    known = replace(Cluster.of("a100-80", 4), accelerator=replace(unit, peaks=dict.fromkeys(precisions, 312e12)))
    works = [Work("product", kind, "", size) for kind in precisions for size in (1e9, 1e10, 1e11)]
    works += [Work(kind, precisions[0], "", size) for kind in ("elementwise", "message") for size in (1e5, 1e6, 1e8)]
    machine = Machine("this machine", unit.memory_bytes, 4, "its links", "2026-05")
    return Calibration.of({work: predict(work, known) for work in works}, machine).cluster


def test_a_calibration_s_file_is_searched_and_planned(tmp_path):
    file, cluster = tmp_path / "machine.json", calibrated("float32", "bfloat16")
    cluster.to_file(file)
    text = output(*SMALL, "--cluster", file, "--count", 1)
    assert text.startswith("4 ranks, 4 per node, each on this machine")
    model = model_of("llama3.2-1b")
    (best,) = search(model, Cluster.from_file(file), 2048, 16, count=1, schedule_names=["1f1b"]).best
    assert f"1. {best.time.seconds:.3f} s, MFU {best.time.mfu:.1%}" in text
    assert f"   {best.plan}\n" in text
    assert step_time(model, best.plan, cluster, 2048, 16, MEGATRON_TIME).seconds == best.time.seconds
    slow = replace(cluster.accelerator, overhead=cluster.accelerator.overhead + 1e-4)
    slower = search(model, replace(cluster, accelerator=slow), 2048, 16, count=1, schedule_names=["1f1b"]).best[0]
    assert slower.time.seconds > 1.1 * best.time.seconds, "measured overheads are counted"


def test_a_calibration_without_the_plan_s_numbers_is_refused_in_one_line(tmp_path):
    calibrated("float32").to_file(tmp_path / "machine.json")
    result = run(*SMALL, "--cluster", tmp_path / "machine.json")
    assert result.exit_code == 1
    assert "this machine has no peak for bfloat16, known are float32; use a plan with one of these" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("plan", "llama3-8", "--gpus", 8), "llama3-8b"), (("plan", "llama3-8b", "--gpus", 8, "--gpu", "h10"), "h100"),
        (("plan", "llama3-405b", "--gpus", 1, "--batch", 1), "no plan fits"),
        (("plan", "llama3-8b", "--gpus", 12, "--nodes-of", 8), "use 16 ranks"),
        (("plan", "llama3-8b", "--gpus", 8, "--schedule", "pipedream"), "synchronous"),
        (("plan", "llama3.2-1b", "--gpus", 1, "--batch", 1, "--tokens", -5), "tokens above 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line(words, message):
    result = run(*words)
    assert result.exit_code == 1
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
