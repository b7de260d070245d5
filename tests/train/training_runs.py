"""A training under a plan beside the same training in one process, in float64."""

import dualpipe_lab as lab
from dualpipe_lab import data, dp, models, train

TEXT = data.frozen_corpus()
LLAMA = models.LlamaConfig(hidden_size=16, ffn_size=32, num_layers=4, num_heads=2, num_kv_heads=2)
V3 = models.V3MoEConfig(
    hidden_size=16, num_layers=4, num_heads=2, num_kv_heads=2, ffn_size=32, expert_ffn_size=16, num_experts=4,
    num_groups=2, balance=1e-2,
)  # fmt: skip
OPTIONS = {
    "sequence_length": 16,
    "global_batch": 8,
    "hyperparameters": dp.Hyperparameters(lr=1e-2),
    "schedule": train.Schedule("cosine", num_warmup=2, num_steps=5, final=0.1),
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
