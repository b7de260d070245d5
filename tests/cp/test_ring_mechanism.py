"""The ring: messages hidden behind work, blocks that are let go, the trace, other kernels, what it refuses."""

import gc
import math

import pytest
import torch
from attention_runs import BATCH, FORMS, SIZE, inputs, reference, run_part, whole
from cp_runs import assert_close, draw
from runs import kept, launch, rounding

import dualpipe_lab as lab
from dualpipe_lab import comm
from dualpipe_lab.cp.closed_forms import AttentionSizes, saved_bytes, sent_bytes
from dualpipe_lab.cp.flash_attention import FlashTiles
from dualpipe_lab.cp.layouts import MessageTimes, make_layout, ring_backward_ns, ring_forward_ns, visible_pairs
from dualpipe_lab.cp.ring_attention import merge, ring_attention
from dualpipe_lab.cp.sequence import shard_sequence
from dualpipe_lab.dp.measure import live_tensors, storage_bytes
from dualpipe_lab.launch.emulator import Link
from dualpipe_lab.viz import Steps

PAIR_MS = 0.25  # of a forward; a backward takes twice as long
LINK = Link(gbps=1e-3, latency_ms=0.5)


class SlowTiles(FlashTiles):
    """The kernel, and model time for every pair."""

    def forward(self, q, k, v, offset, scale):
        lab.compute(PAIR_MS * pairs(q, k, offset))
        return super().forward(q, k, v, offset, scale)

    def backward(self, grad, q, k, v, out, lse, offset, scale):
        lab.compute(2 * PAIR_MS * pairs(q, k, offset))
        return super().backward(grad, q, k, v, out, lse, offset, scale)


def pairs(q, k, offset):
    """Pairs that a block computes."""
    block = torch.ones(q.shape[2], k.shape[2])
    return int((block if offset is None else block.tril(offset)).sum())


def simulated(layout, causal):
    """When every rank is done with the forward and, begun at 0, the backward."""
    ranks = range(layout.num_ranks)
    work = [[round(PAIR_MS * 1e6 * number) for number in row] for row in visible_pairs(layout, causal)]
    position = LINK.transfer_ns(2 * BATCH * 2 * SIZE * 8)
    transfer = [[position * layout.size((rank - step) % layout.num_ranks) for step in ranks] for rank in ranks]
    messages = MessageTimes(transfer, LINK.latency_ns)
    return ring_forward_ns(work, messages), ring_backward_ns(
        [[2 * ns for ns in row] for row in work], messages, messages
    )


def test_time_equals_the_simulation_to_the_nanosecond():
    chosen = [
        (make_layout(name, length, 4), causal)
        for name, length in (("contiguous", 16), ("striped", 14), ("zigzag", 16))
        for causal in (True, False)
    ]

    def fn(rank, world_size):
        found = []
        for layout, causal in chosen:
            parts = [shard_sequence(tensor, layout, rank, 2) for tensor in inputs(layout.length, 2, 2)]
            leaves = [tensor.requires_grad_() for tensor in parts[:3]]
            times = []
            comm.barrier()
            began = lab.now()
            out = ring_attention(*leaves, layout, causal=causal, kernel=SlowTiles())
            times.append(lab.now() - began)
            comm.barrier()
            began = lab.now()
            out.backward(parts[3])
            times.append(lab.now() - began)
            found.append(times)
        return found

    out = launch(fn, 4, clock="virtual", link=LINK)
    for (layout, causal), times in zip(chosen, zip(*out, strict=True), strict=True):
        assert [list(passes) for passes in zip(*times, strict=True)] == list(simulated(layout, causal)), layout


def test_a_rank_saves_its_share_and_holds_two_blocks_of_others():
    num_ranks, heads, length = 4, 2, 256
    sizes = AttentionSizes(BATCH, heads, heads, SIZE, 8, 8)

    def fn(rank, world_size):
        found = {}
        for total in (length, 2 * length):
            layout = make_layout("zigzag", total, world_size)
            for name, form in FORMS.items():
                leaves = [
                    shard_sequence(tensor, layout, rank, 2).requires_grad_()
                    for tensor in inputs(total, heads, heads)[:3]
                ]
                saved = kept(lambda form=form, leaves=leaves, layout=layout: form(*leaves, layout))
                found[name, total] = storage_bytes(tensor.detach() for tensor in saved)
        return found, most_held(rank, world_size)

    def most_held(rank, world_size):
        layout, most = make_layout("zigzag", length, world_size), []
        leaves = [shard_sequence(tensor, layout, rank, 2) for tensor in inputs(length, heads, heads)[:3]]
        gc.freeze()

        class Watch(FlashTiles):
            def forward(self, q, k, v, offset, scale):
                most.append(storage_bytes(live_tensors()))
                return super().forward(q, k, v, offset, scale)

        ring_attention(*leaves, layout, kernel=Watch())
        return most

    block, own = length // num_ranks * sizes.kv_position, saved_bytes(length // num_ranks, sizes)
    state = length // num_ranks * BATCH * heads * 8
    out_lse = state * SIZE + state
    for found, most in launch(fn, num_ranks):
        for total in (length, 2 * length):
            assert found["ring", total] == saved_bytes(total // num_ranks, sizes) == own * total // length
            q_and_out = 2 * total // num_ranks * BATCH * heads * SIZE * 8
            assert found["all-gather", total] == q_and_out + state * total // length + total * sizes.kv_position
        queries = state * SIZE  # which the caller holds anyhow
        assert most == [2 * block + queries + out_lse] * num_ranks


def test_blocks_of_any_tiles_and_huge_scores():
    """LSE of two blocks may differ by more than 700, where a plain exponential of it would overflow."""
    layout = make_layout("zigzag", 24, 3)
    q, k, v, grad = inputs(24, 4, 2)
    tensors = [q * torch.linspace(0, 900, 24)[:, None], k, v, grad]

    def fn(rank, world_size):
        kernels = (FlashTiles(), FlashTiles(1, 1), FlashTiles(3, 5))
        return [run_part(ring_attention, layout, rank, tensors, True, kernel=kernel)[0] for kernel in kernels]

    expected = reference(*tensors, causal=True)
    scores = (tensors[0].abs() @ k.abs().repeat_interleave(2, 1).transpose(-1, -2)).max() * SIZE**-0.5
    tolerance = rounding(torch.float64, 4 * SIZE + 24, float(scores))  # a weight's relative error is its score's error
    for parts in zip(*launch(fn, 3), strict=True):
        for mine, other in zip(whole(parts, layout), expected, strict=True):
            assert_close(mine, other, tolerance)


def test_merge_with_nothing_on_either_side():
    inf = float("inf")
    for ours, theirs, value, total in ((-inf, -inf, 0, -inf), (-inf, -2000, 1, -2000), (3000, -inf, 0, 3000)):
        out, lse = torch.zeros(1, 2), torch.tensor([float(ours)])
        merge(out, lse, torch.ones(1, 2), torch.tensor([float(theirs)]))
        assert out.tolist() == [[value] * 2]
        assert lse.tolist() == [total]


def test_the_trace_shows_blocks_that_go_round_and_gradients_that_come_home():
    def fn(rank, world_size):
        layout = make_layout("zigzag", 12, world_size)
        parts = [shard_sequence(tensor, layout, rank, 2).requires_grad_() for tensor in inputs(12, 1, 1)]
        out = ring_attention(*parts[:3], layout)
        comm.barrier()
        middle = lab.now()
        out.backward(parts[3].detach())
        return middle

    run = launch(fn, 3)
    start, middle = [{f"KV {rank}": f"KV {rank}"} for rank in range(3)], min(run)
    forward = Steps.of_run(run.timeline.between(0, middle), start=start, moves=True)
    backward = Steps.of_run(run.timeline.between(middle, math.inf), start=start, moves=True)
    assert str(forward).splitlines()[2].endswith(": 0->1 KV 2, 1->2 KV 0, 2->0 KV 1")
    lines = [line.partition(": ")[2] for line in str(backward).splitlines()[1:]]
    assert lines[0] == "0->1 KV 0, 0->1 dKV 0, 1->2 KV 1, 1->2 dKV 1, 2->0 KV 2, 2->0 dKV 2"
    assert lines[2] == "0->1 dKV 1, 1->2 dKV 2, 2->0 dKV 0"
    assert lines[3:] == ["KV 1 dKV 0", "KV 2 dKV 1", "KV 0 dKV 2"]  # nobody takes the last KV on
    assert [[colour for _, colour in held] for held in backward.states[-1]] == [[1, 0], [2, 1], [0, 2]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("short", r"(?s)rank 1 of the ring holds 4 positions of <zigzag.*got 3 in axis 2.*shard_sequence\(x, layout"),
        ("keys", r"rank 1 of the ring holds 4 positions .* got 2 in axis 2"),
        ("heads", "3 do not divide among 2"),
        ("ranks", "used by a group of 2 ranks; make the layout for 2"),
    ],
)
def test_what_does_not_fit_is_named_before_a_message_leaves(change, message):
    def fn(rank, world_size):
        layout = make_layout("zigzag", 8, 1 if change == "ranks" else 2)
        q, k = draw(1, 2, 4, 4), draw(1, 2, 4, 4)
        if rank == 1:
            q = {"short": q[:, :, :3], "heads": draw(1, 3, 4, 4)}.get(change, q)
            k = k[:, :, :2] if change == "keys" else k
        ring_attention(q, k, k, layout)

    with pytest.raises(lab.RankError, match=message):
        launch(fn, 2)


def test_bytes_of_a_group_inside_of_a_world():
    """Two rings at once, of ranks that do not follow one another in the world."""
    layout = make_layout("striped", 7, 2)

    def fn(rank, world_size):
        rings = ([0, 3], [1, 2])
        groups = [comm.new_group(ring) for ring in rings]
        mine = next(number for number, ring in enumerate(rings) if rank in ring)
        place = rings[mine].index(rank)
        found, sent = run_part(ring_attention, layout, place, inputs(7, 2, 1), True, group=groups[mine])
        return place, found, sent == sent_bytes("ring", layout, place, AttentionSizes(BATCH, 2, 1, SIZE, 8, 8))

    out = launch(fn, 4)
    expected = reference(*inputs(7, 2, 1), causal=True)
    for ring in ([0, 3], [1, 2]):
        assert [out[rank][0] for rank in ring] == [0, 1]
        assert all(out[rank][2] for rank in ring)
        for mine, other in zip(whole([out[rank][1] for rank in ring], layout), expected, strict=True):
            assert_close(mine, other)
