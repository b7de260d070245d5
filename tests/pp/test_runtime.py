"""What one pipeline refuses, and what passes: lowered programs and unequal stages."""

import pytest
from rank_runs import BYTES, LIKE, bitwise, expected_grads, make_batch, make_stages, run_all
from torch import nn

import dualpipe_lab as lab
from dualpipe_lab import Cost
from dualpipe_lab.pp.runtime import PipelineRuntime
from dualpipe_lab.pp.schedules import build


@pytest.mark.parametrize("link", [None, lab.Link(gbps=0.001, latency_ms=1)])
def test_unequal_stages_on_the_virtual_clock_and_lowered_programs(link):
    transfer, latency = (link.transfer_ns(BYTES), link.latency_ns) if link else (0, 0)
    cost = Cost(F=[1_000_000, 2_000_000, 3_000_000], I=2_000_000, W=1_500_000, latency=latency, transfer=transfer)
    programs = [build("gpipe", 3, 5), build("1f1b", 3, 5), lab.lower(build("1f1b", 3, 5))]
    out, results = run_all(programs, 3, cost=cost, clock="virtual", link=link)
    began = [ranks[0][-1] for ranks in results]
    for program, ranks, start, end in zip(programs, results, began, [*began[1:], 10**18], strict=True):
        assert out.timeline.between(start, end).steps() == [lab.simulate(program, cost, unit="ns")]
        expected, _ = expected_grads(program, make_batch(5))
        assert all(bitwise(ranks[rank][0][rank], expected[rank][rank]) for rank in range(3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": [0, 1]}, r"GPipe places stages \[0\] on rank 0, got modules for \[0, 1\]"),
        ({"world_size": 3}, "GPipe is written for 2 ranks, the group has 3"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    program, stages = build("gpipe", 2, 2), make_stages(2)
    inputs, targets = make_batch(2)

    def fn(rank, world_size):
        mine = {index: stages[index] for index in (change.get("stages", [rank]) if rank == 0 else [rank])}
        PipelineRuntime(program, mine, nn.functional.mse_loss, LIKE).step(inputs, targets)

    with pytest.raises(lab.RankError, match=message):
        lab.launch(fn, change.get("world_size", 2))
