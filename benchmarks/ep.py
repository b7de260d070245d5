"""Expert parallelism beside plain versions of the same.

    python benchmarks/ep.py [--rounds 7]

  plans   `rebalance_experts` for 58 layers of 256 experts in 320 slots, beside the same greedy plan made layer by layer
          and item by item in Python (tests/ep/plain_eplb.py); `balance`, which goes on from it, and what that gains
Every round runs every contender once, one after the other; medians over the rounds.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch

from dualpipe_lab.ep import eplb

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "ep"))
import plain_eplb

LAYERS, EXPERTS, SLOTS = 58, 256, 320
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
            "rebalance_experts": lambda sizes=sizes: eplb.Plan(*eplb.rebalance_experts(loads, *sizes)),
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


def main() -> None:
    """Run all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    plans(arguments.rounds)


if __name__ == "__main__":
    main()
