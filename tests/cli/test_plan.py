"""`dualpipe-lab plan`: what it prints, exports and refuses."""

import json
import re

import pytest
from shell import output, run

from dualpipe_lab.plan import Cluster, Plan
from dualpipe_lab.plan.model_of import model_of
from dualpipe_lab.plan.planner import search

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
