"""Looped and zero-bubble schedules on real ranks: gradients to the last bit, peaks, and the virtual clock."""

import pytest
import torch
from test_runtime import reference, run, summed

import dualpipe_lab as lab
from dualpipe_lab.pp.schedules import interleaved, looped_bfs, zero_bubble_h1, zero_bubble_h2

PROGRAMS = [
    interleaved(2, 5),
    interleaved(3, 4, num_virtual_stages=3),
    looped_bfs(2, 3),
    zero_bubble_h1(3, 7),
    zero_bubble_h1(2, 5, num_virtual_stages=2),
    zero_bubble_h2(3, 7),
    zero_bubble_h2(3, 7, in_flight=4),
]


@pytest.mark.parametrize("program", PROGRAMS, ids=repr)
def test_gradients_equal_accumulation_bitwise_and_times_the_simulation(program):
    # 96 bytes take 96 us on this link
    cost = lab.Cost(F=3_000_000, I=3_000_000, W=2_000_000, latency=500_000, transfer=96_000)
    out = run(program, cost=cost, clock="virtual", link=lab.Link(gbps=0.008, latency_ms=0.5))
    expected, _ = reference(program.num_stages, program.num_microbatches)
    for ours, theirs in zip(summed(out, program.num_stages), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert out.timeline == lab.simulate(program, cost, unit="ns")
    assert [peak for *_, peak in out] == [out.timeline.peak_activations(rank) for rank in range(program.num_ranks)]
