"""`dualpipe-lab plan`: what it prints, exports and refuses."""

import json
import re

import pytest
from shell import output, run

from dualpipe_lab.plan import Cluster, Plan

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


def test_a_cluster_comes_from_a_file(tmp_path):
    Cluster.of("a100-40", 4).to_file(tmp_path / "mine.json")
    assert "A100 SXM 40 GB" in output(*SMALL, "--cluster", tmp_path / "mine.json")
    result = run("plan", "llama3.2-1b", "--gpus", 8, "--cluster", tmp_path / "mine.json")
    assert result.exit_code == 1
    assert "has 4 ranks, got --gpus 8" in result.stderr


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
