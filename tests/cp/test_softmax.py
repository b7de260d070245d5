"""Softmax, whole, in blocks and across ranks: equal to torch's, safe at the edges, with the bytes of the formula."""

import itertools

import pytest
import torch
from cp_runs import ORACLE, assert_close, draw, floats
from hypothesis import given
from hypothesis import strategies as st
from runs import RANKS, kept, launch, sent

from dualpipe_lab.cp.online_softmax import SoftmaxStats, online_average, online_softmax
from dualpipe_lab.cp.ring_softmax import all_reduce_softmax, ring_softmax
from dualpipe_lab.cp.softmax import Softmax, softmax, softmax_backward
from dualpipe_lab.launch.record import traffic

INF = float("inf")
ROWS = torch.tensor(  # a usual row, ties, huge, tiny, hidden parts, nothing to see
    [
        [0.5, -1.25, 3, 3, 0, 1],
        [2, 2, 2, 2, 2, 2],
        [1e4, -1e4, 9999, 0, 1e4, 5],
        [-1e4, -1e4, -1e4 - 1, -2e4, -1e4, -3e4],
        [-INF, -INF, 1, -INF, 2, -INF],
        [-INF, -INF, -INF, -INF, -INF, -INF],
    ],
    dtype=torch.float64,
)
EXPECTED = torch.softmax(ROWS, -1).nan_to_num(0)


def test_softmax_and_its_backward_equal_the_oracle_and_torch():
    case = {name: floats(values) for name, values in ORACLE["softmax"].items()}
    x, y, dy = case["x"], case["y"], case["dy"]
    assert_close(softmax(x), y)
    assert_close(softmax_backward(softmax(x), dy), case["dx"])
    assert_close(SoftmaxStats.of(x).lse, case["lse"])
    assert_close(softmax(ROWS), EXPECTED)
    assert torch.autograd.gradcheck(Softmax.apply, (draw(3, 4).requires_grad_(),))
    x = ROWS.clone().requires_grad_()
    Softmax.apply(x).backward(draw(*ROWS.shape))
    assert x.grad[-1].tolist() == [0] * 6
    assert x.grad.isfinite().all()
    assert [saved.shape for saved in kept(lambda: Softmax.apply(draw(5, 7).requires_grad_()))] == [(5, 7)]


def test_16_bit_scores_are_summed_in_fp32():
    x = torch.zeros(1, 1000, dtype=torch.bfloat16)
    assert SoftmaxStats.of(x).total.item() == 1000  # added up in bf16 it would stop at 256
    for result in (softmax(x), online_softmax(x, 7)):
        assert result.dtype == torch.bfloat16
        assert torch.equal(result, torch.full_like(x, 1e-3))


scores = st.lists(st.one_of(st.just(-INF), st.floats(-2000, 2000)), min_size=1, max_size=12)


@given(scores, st.integers(1, 13))
def test_blocks_of_any_size_give_the_same(values, block_size):
    x = torch.tensor(values, dtype=torch.float64)
    v = draw(len(values), 3)
    expected = torch.softmax(x, -1).nan_to_num(0)
    assert_close(online_softmax(x, block_size), expected)
    assert_close(online_average(x, v, block_size), expected @ v)


@given(st.lists(scores, min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_pairs_merge_in_any_order_and_grouping(blocks, random):
    whole = torch.tensor(list(itertools.chain(*blocks)), dtype=torch.float64)
    pairs = [SoftmaxStats.of(torch.tensor(block, dtype=torch.float64)) for block in blocks]
    pairs.append(SoftmaxStats.identity(torch.zeros((), dtype=torch.float64)))
    random.shuffle(pairs)
    while len(pairs) > 1:
        at = random.randrange(len(pairs) - 1)
        pairs[at : at + 2] = [pairs[at].merge(pairs[at + 1])]
    assert pairs[0].maximum == whole.max()
    assert_close(pairs[0].total, SoftmaxStats.of(whole).total)
    assert_close(pairs[0].lse, torch.logsumexp(whole, -1))


def test_the_trace_of_the_oracle_and_blocks_of_nothing():
    case = next(case for case in ORACLE["cases"] if "online_trace_head0_row2_blocks_3_3_1" in case["expected"])
    scaled = floats(case["Q"])[0, 2] @ floats(case["K"])[0].t() / 2
    state, trace = SoftmaxStats.identity(torch.zeros((), dtype=torch.float64)), []
    for block in scaled.split(3):
        state = state.merge(SoftmaxStats.of(block))
        trace.append([float(state.maximum), float(state.total)])
    assert_close(torch.tensor(trace), floats(case["expected"]["online_trace_head0_row2_blocks_3_3_1"]).float(), 1e-6)
    assert SoftmaxStats.of(torch.empty(3, 0)).lse.tolist() == [-INF] * 3
    assert softmax(torch.empty(2, 0)).shape == (2, 0)
    with pytest.raises(ValueError, match="at least 1 score, got block_size=0"):
        online_softmax(ROWS, 0)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_ring_softmax_equals_one_process_with_the_bytes_of_the_formula(num_ranks):
    """Columns are dealt out unevenly: 6 = 6, 1 + 5, 1 + 2 + 3, 1 + 2 + 0 + 3."""
    widths = [[6], [1, 5], [1, 2, 3], [1, 2, 0, 3]][num_ranks - 1]
    dy = draw(*ROWS.shape, seed=1)

    def fn(rank, world_size):
        found = []
        for function in (ring_softmax, all_reduce_softmax):
            x = ROWS.split(widths, -1)[rank].clone().requires_grad_()
            y, forward = sent(lambda function=function, x=x: function(x))
            _, backward = sent(lambda y=y: y.backward(dy.split(widths, -1)[rank].clone()))
            found.append((y.detach(), x.grad, forward, backward))
        return found

    out, rows = launch(fn, num_ranks), len(ROWS)
    reduced = [
        traffic.all_reduce([8 * n for n in traffic.split(rows, num_ranks)], rank).sent for rank in range(num_ranks)
    ]
    for found, forward in zip(
        zip(*out, strict=True), ([(num_ranks - 1) * 2 * 8 * rows] * num_ranks, [2 * n for n in reduced]), strict=True
    ):
        y, dx, there, back = zip(*found, strict=True)
        assert_close(torch.cat(y, -1), EXPECTED)
        assert_close(torch.cat(dx, -1), softmax_backward(EXPECTED, dy))
        assert list(there) == forward
        assert list(back) == reduced
