"""A V3 model on DualPipe with overlapped experts: embedding, head, shared experts, balance loss, tp and cp."""

from dataclasses import replace

import torch
from overlap_models import CONFIG, added, one_process, run, worst

import dualpipe_lab as lab

LIMIT = 1e-12


def several(rank, world_size, cases):
    torch.manual_seed(rank)  # weights made here would be found out
    return [run(*case[:-1], **case[-1]) for case in cases]


def check(world_size, cases, num_data, timeout=180):
    out = lab.launch(several, world_size, cases, timeout=timeout)
    for place, case in enumerate(cases):
        results = [found[place] for found in out]
        error, name = worst(results)
        print(f"{case[2]} {case[1]} {case[4]} {case[-1]}: {error:.1e} in {name}")
        assert error <= LIMIT, (case, name, error)
        _, _, loads = one_process(case[0], case[3], num_data)
        counted = added(results)
        assert loads.keys() == counted.keys()
        assert all(torch.equal(counted[layer], load) for layer, load in loads.items()), case


def test_dualpipe_with_experts_has_the_gradients_of_one_process():
    axes = [("pp", 2), ("ep", 2)]
    bare = replace(CONFIG, num_shared_experts=0, balance=0.0)
    check(
        4,
        [
            (CONFIG, axes, "dualpipe", 4, [2, 3], {}),
            (CONFIG, axes, "dualpipe", 4, [4, 1], {"hook": "serial"}),
            (CONFIG, axes, "dualpipe", 4, [3, 2], {"plain": (0,)}),
            (CONFIG, axes, "dualpipe", 4, [3, 2], {"plain": (1,), "fill": False}),
            (bare, axes, "dualpipe", 4, [1, 4], {}),
            (CONFIG, axes, "dualpipev", 4, [2, 1, 1, 1], {}),
            (CONFIG, axes, "zero_bubble_h1", 3, [2, 3], {"again": True}),
        ],
        num_data=2,
    )
