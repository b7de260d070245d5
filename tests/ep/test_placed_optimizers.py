"""Ddp and ZeRO train a model whose experts lie in the slots of a placement as one process trains the plain model."""

import pytest
from placed_runs import Run, check, plan
from runs import launch

import dualpipe_lab as lab

TOPOLOGIES = {
    "dp 2, ep 2": (lab.Topology([("dp", 2), ("ep", 2)]), 2),
    "ep 4": (lab.Topology([("ep", 4)]), 4),
    "ep 2 within dp 4": (lab.Topology([("dp", 4)], edp=2), 2),
    "tp 2, ep 2": (lab.Topology([("ep", 2), ("tp", 2)]), 2),
    "dp 2, ep 2, tp 2": (lab.Topology([("dp", 2), ("ep", 2), ("tp", 2)]), 2),
}


@pytest.fixture(scope="module")
def plain():
    """Steps of the model without a placement, in one process."""
    return launch(lambda rank, world_size: Run(lab.Topology([("dp", 1)]), "ddp").train(), 1)[0]


CASES = [(name, stage) for name in TOPOLOGIES for stage in ("ddp", "zero1")]
CASES += [("dp 2, ep 2", "zero2"), ("dp 2, ep 2", "zero3"), ("ep 2 within dp 4", "zero2")]


@pytest.mark.drawn(6)
@pytest.mark.parametrize(("name", "stage"), CASES)
def test_steps_are_those_of_one_process(plain, name, stage):
    """Gradients, clip norm, loss and weights; replicas are bitwise equal in weights and moments; then with moves."""
    topology, ep_size = TOPOLOGIES[name]

    def fn(rank, world_size):
        return [Run(topology, stage, plan(ep_size)).train(moves) for moves in (0, 3)]

    for still, moved in launch(fn, topology.world_size, timeout=400):
        check(still, plain)
        check(moved, plain, moved=True)
