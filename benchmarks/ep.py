"""Expert parallelism beside plain versions of the same.

    python benchmarks/ep.py [--rounds 7] [--steps 4] [--only plans | layers]

  plans   `rebalance_experts` for 58 layers of 256 experts in 320 slots, beside the same greedy plan made layer by layer
          and item by item in Python (tests/ep/plain_eplb.py); `balance`, which goes on from it, and what that gains
  layers  forward and backward of `Experts` on 2 GLOO ranks, beside the same layer with torch's functional collectives,
          a loop over experts and autograd (_plain_moe.py); both have the same gradients before the clock starts
Every round runs every contender once, one after the other; medians over the rounds.
"""

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch
from _paired import Found, cells, paired, paired_table
from _plain_moe import PlainExperts
from rich.console import Console

import dualpipe_lab as lab
from dualpipe_lab.ep import Experts, eplb

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "ep"))
import plain_eplb

LAYERS, EXPERTS, SLOTS = 58, 256, 320
RANKS, SIZES = 2, (128, 256, 16, 4)  # ranks; hidden, inner, experts, experts per token
POLICIES = {"hierarchical": (8, 4, 40), "global": (1, 1, 40)}


def plans(rounds: int) -> None:
    """Print the time of a plan, and how far its heaviest rank lies above the mean."""
    loads = np.random.default_rng(0).lognormal(0, 1, (LAYERS, EXPERTS))
    shape = f"{LAYERS} layers, {EXPERTS} experts in {SLOTS} slots on 40 ranks"
    print(f"\n{shape}, lognormal loads: ms per plan, max/mean load")
    for policy, (groups, nodes, ranks) in POLICIES.items():
        sizes = SLOTS, groups, nodes, ranks
        contenders = {
            "item by item": lambda sizes=sizes: [plain_eplb.plan(row, *sizes) for row in loads.tolist()],
            "rebalance_experts": lambda sizes=sizes: eplb.ExpertPlacement(*eplb.rebalance_experts(loads, *sizes)),
            "balance": lambda sizes=sizes: eplb.balance(loads, *sizes),
        }
        times: dict[str, list[float]] = {name: [] for name in contenders}
        made = {}
        for _ in range(rounds):
            for name, plan in contenders.items():
                began = time.perf_counter()
                made[name] = plan()
                times[name].append(time.perf_counter() - began)
        assert made["rebalance_experts"].physical_to_logical.tolist() == made["item by item"]
        for name, found in times.items():
            row = f"{policy:<14}{name:<20}{median(found) * 1e3:8.1f}"
            if name != "item by item":
                totals = eplb.rank_loads(loads, made[name], ranks)
                row += f"{float((totals.max(1).values / totals.mean(1)).mean()):9.4f}"
            print(row, flush=True)


def compare(rank: int, world_size: int, tokens: int, rounds: int, steps: int) -> Found:
    """What forward and backward of both layers took in every round, on one rank."""
    torch.manual_seed(0)
    hidden, ffn, experts, top_k = SIZES
    ours = Experts(hidden, ffn, experts)
    theirs = PlainExperts(*ours.weights)
    torch.manual_seed(rank)
    x, grad = torch.randn(tokens, hidden, requires_grad=True), torch.randn(tokens, hidden)
    scores, chosen = torch.randn(tokens, experts).softmax(1).topk(top_k)

    def step_of(layer: torch.nn.Module) -> Callable[[], None]:
        def step() -> None:
            layer.zero_grad()
            layer(x, scores, chosen).backward(grad)

        return step

    both = {"ours": step_of(ours), "theirs": step_of(theirs)}
    for step in both.values():
        step()
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-4)
    gc.freeze()
    return paired(both, rounds, steps)


def layers(rounds: int, steps: int) -> None:
    """Print the time of a layer of experts, forward and backward."""
    hidden, ffn, experts, top_k = SIZES
    title = f"{experts} experts {hidden} -> {ffn}, {top_k} per token, {RANKS} GLOO ranks, {rounds} rounds"
    table = paired_table(title)
    for tokens in (64, 512):
        found = lab.launch(compare, RANKS, tokens, rounds, steps, timeout=600, output="collect")[0]
        table.add_row(f"Experts / torch, {tokens} tokens per rank", *cells(found))
    Console(width=180).print(table)


def main() -> None:
    """Run all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="of a layer, in a row")
    parser.add_argument("--only", choices=("plans", "layers"), help="one of the tables")
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    if arguments.only != "layers":
        plans(arguments.rounds)
    if arguments.only != "plans":
        layers(arguments.rounds, arguments.steps)


if __name__ == "__main__":
    main()
