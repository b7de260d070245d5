"""Two directions on real ranks: gradients bit for bit, peaks, and the virtual clock."""

import pytest
import torch
from test_runtime import make_batch, make_stages, reference, run, summed
from torch import nn

import dualpipe_lab as lab
from dualpipe_lab.pp.schedules import dualpipe, dualpipev, easy_dualpipe


def one_direction(num_stages, num_microbatches, chosen):
    """Gradients of plain accumulation over some of the microbatches."""
    model = nn.Sequential(*make_stages(num_stages))
    inputs, targets = make_batch(num_microbatches)
    for m in chosen:
        (nn.functional.mse_loss(model(inputs[m]), targets[m]) * (1 / num_microbatches)).backward()
    return [[p.grad for p in stage.parameters()] for stage in model]


def checked_run(program):
    """Run on the virtual clock: the simulated times, the predicted peaks."""
    # 96 bytes take 96 us on this link
    cost = lab.Cost(F=3_000_000, I=3_000_000, W=2_000_000, overlap=7_000_000, latency=500_000, transfer=96_000)
    out = run(program, cost=cost, clock="virtual", link=lab.Link(gbps=0.008, latency_ms=0.5))
    assert out.timeline == lab.simulate(program, cost, unit="ns")
    assert [peak for *_, peak in out] == [out.timeline.peak_activations(rank) for rank in range(program.num_ranks)]
    return out


@pytest.mark.parametrize(
    "program", [easy_dualpipe(2, 2), easy_dualpipe(4, 6), dualpipe(2, 6), dualpipe(4, 8)], ids=repr
)
def test_mirrored_halves_sum_to_the_gradient_bit_for_bit(program):
    p, m = program.num_ranks, program.num_microbatches
    out = checked_run(program)
    down, up = one_direction(p, m, range(m // 2)), one_direction(p, m, range(m // 2, m))
    for stage in range(p):
        halves = out[stage][0][stage], out[p - 1 - stage][0][stage]
        for ours, expected in zip(halves, (down[stage], up[stage]), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    for ours, theirs in zip(summed(out, p), reference(p, m)[0], strict=True):
        assert all((a - b).abs().max() <= 1e-12 * max(1, b.abs().max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("program", [dualpipev(1, 3), dualpipev(2, 5), dualpipev(3, 6)], ids=repr)
def test_dualpipev_s_gradients_equal_accumulation_bitwise(program):
    out = checked_run(program)
    expected, _ = reference(program.num_stages, program.num_microbatches)
    for ours, theirs in zip(summed(out, program.num_stages), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
