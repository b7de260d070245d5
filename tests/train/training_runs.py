"""A training under a plan beside the same training in one process, in float64."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

import dualpipe_lab as lab
from dualpipe_lab import data, models, tp, train

HERE = Path(__file__).parent
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{HERE.parents[1]}{os.pathsep}{HERE}"}
TEXT = data.frozen_corpus()
LLAMA = models.LlamaConfig(hidden_size=16, ffn_size=32, num_layers=4, num_heads=2, num_kv_heads=2)
V3 = models.V3MoEConfig(
    hidden_size=16, num_layers=4, num_heads=2, num_kv_heads=2, ffn_size=32, expert_ffn_size=16, num_experts=4,
    num_groups=2, balance=1e-2,
)  # fmt: skip
QWEN3_MOE = replace(
    V3, num_groups=1, num_groups_per_token=1, num_shared_experts=0, scale=1.0, scoring="softmax", normalise=False,
    selection_bias=False, qk_norm=True, rope_scaling=tp.YarnScaling(4.0, 8.0, beta_fast=4.0), num_kv_heads=1,
)  # fmt: skip
OPTIONS = {
    "sequence_length": 16,
    "global_batch": 8,
    "lr": 1e-2,
    "batch_growth": [(3, 16)],
    "schedule": train.LRSchedule("cosine", num_warmup=1, num_hold=1, num_steps=4, final=0.1, later=[(4, 0.05)]),
    "bias_speed": 1e-2,
}


def plan(**fields):
    return lab.Plan(**{"precision": "float64", **fields})


def run(config, chosen, steps=5, text=TEXT, **options):
    return train.run(config, chosen, text, steps=steps, timeout=240, **{"log_every": 0, **OPTIONS, **options})


def worst(result, expected):
    """The largest differences of loss and norm, relative, and of weights, relative to the largest weight."""
    pairs = list(zip(result.losses + result.norms, expected.losses + expected.norms, strict=True))
    numbers = max(abs(a - b) / abs(b) for a, b in pairs)
    weights, right = result.weights(), expected.weights()
    assert weights.keys() == right.keys()
    largest = max(float(tensor.abs().max()) for tensor in right.values())
    return numbers, max(float((weights[name] - right[name]).abs().max()) for name in right) / largest


def check(result, expected):
    numbers, weights = worst(result, expected)
    assert numbers < 1e-10, f"{result.title}: loss or norm off by {numbers:.1e}"
    assert weights < 1e-8, f"{result.title}: weights off by {weights:.1e}"
    return numbers, weights


@contextmanager
def script(folder, code, *words, begins=None, **environment):
    """A script in a process of its own, after it has printed a line that begins so; `words` are told to Python."""
    (folder / "script.py").write_text(code)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    command = [sys.executable, *map(str, words or ["script.py"])]
    with subprocess.Popen(command, cwd=folder, env=ENVIRONMENT | environment, **pipes) as process:
        if begins is not None:
            said = []
            for line in process.stdout:
                said.append(line)
                if line.startswith(begins):
                    break
            else:
                raise AssertionError("".join(said))
        yield process


def torchrun(num_ranks, *words):
    """The words that start a script with so many ranks."""
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_ranks, "script.py", *words)


def sums_of(weights):
    """One number for each tensor, in which every element has a factor of its own."""
    flat = {name: tensor.double().abs().flatten() for name, tensor in weights.items()}
    return {name: float(each @ torch.linspace(1, 2, len(each), dtype=torch.float64)) for name, each in flat.items()}


def say(result):
    """Print rows and sums of weights on rank 0 of torchrun."""
    if os.environ["RANK"] == "0":
        rows = [(row.step, row.loss, row.norm) for row in result.metrics]
        print("rows", json.dumps([rows, sums_of(result.weights())]), flush=True)
