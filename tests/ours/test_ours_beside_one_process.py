"""Parts in smaller runs, each equal to one process: tensor and data parallel, pipelines, experts; and rows as texts."""

import re
from pathlib import Path

import pytest
import torch

import dualpipe_lab as lab
import dualpipe_ours
from dualpipe_course.own.plain_model import (
    EXPERTS,
    HEADS,
    LR,
    ROUTE,
    WIDTH,
    attention,
    experts,
    leaves,
    make_batch,
    make_layers,
    train,
)
from dualpipe_lab.pp import schedules
from dualpipe_ours.memory import rank_bytes
from dualpipe_ours.row_messages import with_messages
from dualpipe_ours.rows_1f1b import one_f_one_b_rows
from dualpipe_ours.rows_dualpipe import dualpipe_place, dualpipe_rows
from dualpipe_ours.rows_dualpipev import dualpipev_place, dualpipev_rows
from dualpipe_ours.rows_gpipe import gpipe_place, gpipe_rows
from dualpipe_ours.rows_zb_h1 import zb_h1_rows

CUT = {"q": 0, "k": 0, "v": 0, "o": 1, "up": 0, "down": 1}
ONE_WAY = {"gpipe": gpipe_rows, "1f1b": one_f_one_b_rows, "zero_bubble_h1": zb_h1_rows}
STEPS, TOKENS = 3, 6
ORDER = [
    *("memory", "ring", "data", "buckets", "zero1", "zero3", "column", "row", "tokens", "block"),
    *("messages", "rows_gpipe", "row_messages", "stage", "execute", "rows_1f1b", "later", "rows_zb_h1"),
    *("softmax", "ring_attention", "exchange", "moe", "router", "steps", "pair"),
    *("rows_dualpipe", "rows_dualpipev", "held", "train"),
]


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def plain_attend(q, k, v):
    hidden = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
    return (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ v


def dense(rank, world_size, mode):
    """tp 2 x dp 2; the last sequence has no targets.  Return losses, first gradients, weights, by layer and name."""
    from dualpipe_ours.block import layer, norm
    from dualpipe_ours.buckets import Buckets
    from dualpipe_ours.column import linear
    from dualpipe_ours.data import num_tokens, share_of_loss
    from dualpipe_ours.ring import all_reduce
    from dualpipe_ours.zero1 import ShardedAdam
    from dualpipe_ours.zero3 import Unit, shard_of

    (replica, member), cut = divmod(rank, 2), mode == "cut"
    tensor, data, world = [2 * replica, 2 * replica + 1], [member, 2 + member], list(range(4))
    layers = [
        {name: (v.chunk(2, CUT[name])[member] if name in CUT else v).clone().requires_grad_() for name, v in w.items()}
        for w in make_layers(2, with_experts=False)
    ]
    head = layers[-1]["head"]
    if mode == "zero3":
        layers[-1]["head"] = shard_of(head, data)
    named = leaves(layers)
    whole = [leaf for (_, name, _), leaf in named.items() if name not in CUT]
    buckets = Buckets(whole, tensor, 200) if cut else None
    own = {name: leaf for name, leaf in named.items() if mode != "zero3" or name[1] != "head"}
    adam, losses, first = ShardedAdam(own.values(), data, LR), [], {}
    counted = world if cut else data
    for step in range(STEPS):
        for leaf in named.values():
            leaf.grad = None
        ids, targets = (x[replica] for x in make_batch(2, TOKENS, step))
        if cut:
            ids, targets = (x.chunk(2)[member] for x in (ids, targets))
        x = layers[0]["embed"][ids]
        for w in layers:
            x = layer(x, w, HEADS // 2, plain_attend, tensor, cut)
        x, of_head = norm(x, layers[-1]["norm3"]), layers[-1]["head"]
        if mode == "zero3":
            logits = Unit.apply(x, of_head, lambda x, w: x @ w.t(), tuple(head.shape), data)
        else:
            logits = linear(x, of_head)
        loss = share_of_loss(logits, targets, num_tokens(targets, counted))
        loss.backward()
        if buckets:
            buckets.finish()
        loss = loss.detach().clone()
        all_reduce(loss, counted)
        losses.append(float(loss))
        first = first or summed(named, own, data)
        adam.step()
    return losses, first, {name: leaf.detach() for name, leaf in own.items()}


def summed(named, own, data):
    """The gradients as they are, and those that are summands over the data ranks added up."""
    from dualpipe_ours.data import sum_gradients

    copies = {name: torch.zeros_like(leaf).requires_grad_() for name, leaf in own.items()}
    for name, copy in copies.items():
        copy.grad = own[name].grad.clone()
    sum_gradients(copies.values(), data)
    return {name: copies[name].grad if name in copies else leaf.grad.clone() for name, leaf in named.items()}


@pytest.mark.parametrize("mode", ["cut", "whole", "zero3"])
def test_tensor_and_data_parallel(mode):
    found = lab.launch(dense, 4, mode, timeout=240)
    losses, first, weights = train(make_layers(2, with_experts=False), [make_batch(2, TOKENS, s) for s in range(STEPS)])
    for rank, (ours, grads, parts) in enumerate(found):
        member, replica = rank % 2, rank // 2
        assert ours[0] == pytest.approx(losses[0], rel=0, abs=1e-10)
        for name, grad in grads.items():
            wanted = first[name].chunk(2, CUT[name[1]])[member] if name[1] in CUT else first[name]
            if mode == "zero3" and name[1] == "head":
                flat = torch.cat([wanted.flatten(), wanted.new_zeros(wanted.numel() % 2)])
                wanted = flat.view(2, -1)[replica]
            close(grad, wanted)
        if mode != "zero3":
            assert ours == pytest.approx(losses, rel=0, abs=1e-10)
            for name, value in parts.items():
                close(value, weights[name].chunk(2, CUT[name[1]])[member] if name[1] in CUT else weights[name])


def pipeline(rank, world_size, row, num_microbatches):
    """One step of a row: the losses and the gradients of this rank's layer."""
    from dualpipe_ours.block import layer, norm
    from dualpipe_ours.column import linear
    from dualpipe_ours.data import num_tokens, share_of_loss
    from dualpipe_ours.execute import execute
    from dualpipe_ours.later import SplitStage

    w = make_layers(world_size, with_experts=False)[rank]
    for leaf in w.values():
        leaf.requires_grad_()
    ids, targets = make_batch(num_microbatches, TOKENS)

    def f(x):
        y = layer(w["embed"][x] if "embed" in w else x, w, HEADS, plain_attend, [rank], False)
        return linear(norm(y, w["norm3"]), w["head"]) if "head" in w else y

    total = num_tokens(targets, [rank])
    stages = {rank: SplitStage(f, w.values())}
    row = with_messages(row, rank, gpipe_place, world_size)
    losses = execute(row, stages, gpipe_place, world_size, ids, lambda y, i: share_of_loss(y, targets[i], total))
    return losses, {name: leaf.grad for name, leaf in w.items()}


@pytest.mark.parametrize("name", ONE_WAY)
def test_pipelines(name):
    rows = ONE_WAY[name](3, 4)
    found = lab.launch(lambda rank, size: pipeline(rank, size, rows[rank], 4), 3, timeout=240)
    losses, first, _ = train(make_layers(3, with_experts=False), [make_batch(4, TOKENS)])
    assert float(sum(found[-1][0].values())) == pytest.approx(losses[0], rel=0, abs=1e-10)
    for stage, (_, grads) in enumerate(found):
        for weight, grad in grads.items():
            close(grad, first[stage, weight, None])


def mixture(rank, world_size):
    """Ring attention and experts on this rank's tokens, with autograd: the output, and gradients."""
    from dualpipe_ours.block import attention as attend
    from dualpipe_ours.moe import moe
    from dualpipe_ours.ring_attention import RingAttention
    from dualpipe_ours.router import choose

    w, ranks, here = make_layers(1)[0], list(range(world_size)), EXPERTS // world_size
    own = slice(rank * here, (rank + 1) * here)
    w |= {name: w[name][own] for name in ("gates", "ups", "downs")}
    for leaf in leaves([w]).values():
        leaf.requires_grad_()
    x = inputs(world_size).chunk(world_size)[rank].requires_grad_()
    y = attend(x, w, HEADS, lambda q, k, v: RingAttention.apply(q, k, v, ranks))
    chosen, weights = choose(x, w["router"], w["bias"], *ROUTE)
    y = y + moe(x, chosen, weights, list(zip(w["gates"], w["ups"], w["downs"], strict=True)), EXPERTS, ranks)
    (y * y.detach().cos()).sum().backward()
    return y.detach(), x.grad, w["router"].grad, w["q"].grad, [one.grad for one in w["ups"]]


def inputs(world_size):
    return torch.randn(3 * world_size, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_context_and_experts(world_size):
    found = lab.launch(mixture, world_size, timeout=240)
    w, x = make_layers(1)[0], inputs(world_size).requires_grad_()
    for leaf in leaves([w]).values():
        leaf.requires_grad_()
    y = attention(x, w) + experts(x, w)
    (y * y.detach().cos()).sum().backward()
    close(torch.cat([own[0] for own in found]), y.detach())
    close(torch.cat([own[1] for own in found]), x.grad)
    close(sum(own[2] for own in found), w["router"].grad)
    close(sum(own[3] for own in found), w["q"].grad)
    ups = [grad for own in found for grad in own[4]]
    for grad, wanted in zip(ups, w["ups"], strict=True):
        close(
            torch.zeros_like(wanted) if grad is None else grad,
            torch.zeros_like(wanted) if wanted.grad is None else wanted.grad,
        )


def text(program):
    return [" ".join(map(str, row)) for row in program.ranks]


def test_rows_are_the_library_s():
    for p in range(1, 6):
        for m in range(1, 9):
            for name, rows in ONE_WAY.items():
                assert rows(p, m) == text(schedules.build(name, p, m)), (name, p, m)
    for p in (2, 4, 6):
        for m in range(2 * p, 2 * p + 6, 2):
            assert dualpipe_rows(p, m) == text(schedules.dualpipe(p, m))
    for p in (1, 2, 3):
        for m in range(2 * p, 2 * p + 4):
            assert dualpipev_rows(p, m) == text(schedules.dualpipev(p, m))


def test_messages_stand_beside_what_needs_and_makes_them():
    row, place = dualpipe_rows(2, 4)[0], dualpipe_place(2, 4)
    assert with_messages(row, 0, place, 2).startswith("0F0 0SEND_F0 1RECV_F2 1F2 0F1 0SEND_F1 1B2 1SEND_B2 1RECV_F3")
    v, place = dualpipev_rows(1, 2)[0], dualpipev_place(1)
    assert with_messages(v, 0, place, 2) == v


def test_what_a_stage_keeps():
    assert rank_bytes(10, 4, 8, 100, 3) == 8 * (10 + 10 + 3 + 3) + 300


def test_earlier_parts_import_no_later_one():
    for number, name in enumerate(ORDER):
        source = Path(dualpipe_ours.__file__).with_name(f"{name}.py").read_text()
        imported = set(re.findall(r"^from dualpipe_ours\.(\w+) import", source, re.MULTILINE))
        assert imported <= set(ORDER[:number]), name
        of_comm = re.findall(r"^from dualpipe_lab\.comm import (.*)$", source, re.MULTILINE)
        assert set(", ".join(of_comm).split(", ")) <= {"", "get_rank", "get_world_size", "isend", "irecv", "Work"}, name
    assert {path.stem for path in Path(dualpipe_ours.__file__).parent.glob("[a-z]*.py")} == set(ORDER)
