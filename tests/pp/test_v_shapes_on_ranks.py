"""V-shaped schedules on real ranks: gradients to the last bit, peaks, messages, and the virtual clock."""

import pytest
import torch
from test_runtime import reference, run, summed

import dualpipe_lab as lab
from dualpipe_lab.pp.schedules import v_half, v_min, zbv

PROGRAMS = [zbv(1, 2), zbv(2, 2), zbv(3, 6), v_half(3, 5), v_half(2, 4), v_min(3, 5)]


@pytest.mark.parametrize("program", PROGRAMS, ids=repr)
def test_gradients_equal_accumulation_bitwise_and_times_the_simulation(program):
    # 96 bytes take 96 us on this link
    cost = lab.Cost(F=3_000_000, I=4_000_000, W=2_000_000, latency=500_000, transfer=96_000)
    out = run(program, cost=cost, clock="virtual", link=lab.Link(gbps=0.008, latency_ms=0.5))
    expected, _ = reference(program.num_stages, program.num_microbatches)
    for ours, theirs in zip(summed(out, program.num_stages), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert out.timeline == lab.simulate(program, cost, unit="ns")
    assert [peak for *_, peak in out] == [out.timeline.peak_activations(rank) for rank in range(program.num_ranks)]
    assert out.ledger.count("isend") == 4 * (program.num_ranks - 1) * program.num_microbatches
