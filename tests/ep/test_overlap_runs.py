"""Pairs on real ranks: the same bits in every order, the judge's gradients, the simulated time, the counted bytes."""

import random
from weakref import ref

import pytest
import torch
from ep_runs import close
from overlap_runs import judge, leaves_of, pairs, pipeline
from torch import nn
from torch.nn.functional import mse_loss

import dualpipe_lab as lab
from dualpipe_lab import schedules
from dualpipe_lab.ep.overlap import (
    Order,
    emulated,
    forward_alone,
    host_calls,
    one_f_one_b_basic,
    one_f_one_b_overlap,
    simulate,
    ticks_of,
)
from dualpipe_lab.ep.overlap import closed_forms as forms
from dualpipe_lab.ep.overlap.executor import MicrobatchPass, PlainLayer, execute
from dualpipe_lab.ep.overlap.stage import OverlappableStage, overlapped_forward_backward
from dualpipe_lab.pp.runtime import ReadyAction, Stage
from dualpipe_lab.pp.runtime.stage import run_pair_serially

MS = emulated.MS
SIZES = emulated.Sizes()


def orders_of(num_layers):
    return [
        one_f_one_b_basic(num_layers),
        one_f_one_b_overlap(num_layers),
        one_f_one_b_overlap(num_layers, split=False),
        *(shuffled(num_layers, seed) for seed in range(1)),
    ]


def shuffled(num_layers, seed):
    """Any legal order."""
    pair, rng = one_f_one_b_overlap(num_layers), random.Random(seed)
    while True:
        rows, done, left = ([], []), set(), pair.pieces
        while left:
            ready = sorted(op for op in left if op.needs not in pair.pieces or op.needs in done)
            op = rng.choice(ready)
            rows[op.is_comm].append(op)
            left.remove(op)
            done.add(op)
        order = Order(f"shuffled {seed}", *map(tuple, rows), forward=1, backward=0)
        host_calls(order)
        return order


def whole(ranks, place):
    """An expert weight's gradient, or the sum of a replicated one's."""
    parts = [rank[place] for rank in ranks]
    return torch.cat(parts) if parts[0].dim() == 3 else sum(parts)


@pytest.mark.parametrize(
    ("world_size", "sizes", "num_layers", "tokens"),
    [
        (2, SIZES, 2, None),
        (2, emulated.Sizes(top_k=4), 1, None),  # k = E
        (4, emulated.Sizes(tokens=3, experts=8), 2, [3, 0, 5, 1]),  # experts without a token, a rank without any
    ],
)
def test_an_order_says_when_and_not_what(world_size, sizes, num_layers, tokens):
    weights = emulated.make_weights(num_layers, sizes)
    orders = orders_of(num_layers)
    out = lab.launch(pairs, world_size, weights, sizes, orders, [None], False, tokens)
    expected, grads = judge(weights, sizes, world_size, tokens)
    for rank in range(world_size):
        first = out[rank][0][0]
        assert all(close(ours, theirs) for ours, theirs in zip(first, expected[rank], strict=False))
        for other, *_ in out[rank][1:]:
            assert all(map(torch.equal, first, other))
    firsts = [results[0][0][3:] for results in out]
    assert len(grads) == len(firsts[0])
    for place, theirs in enumerate(grads):
        assert close(whole(firsts, place), theirs)


def test_the_virtual_clock_is_the_simulation_and_every_order_sends_the_same_bytes():
    num_layers, comm = 4, 6
    weights, orders = emulated.make_weights(num_layers), orders_of(num_layers)
    ticks = [ticks_of(work * MS, comm * MS) for work in (12, 6, 4)]  # communication 0.5, 1 and 1.5 times the work
    ticks.append(ticks_of(6 * MS, comm * MS, M_W=2 * MS, A_F=9 * MS))
    out = lab.launch(pairs, 2, weights, SIZES, orders, ticks, True, clock="virtual", link=SIZES.link(comm))
    num_bytes = 4 * num_layers * SIZES.num_bytes(2)
    for results in out:
        cases = [(order, some) for order in orders for some in ticks]
        for (order, some), (_, streams, sent) in zip(cases, results, strict=True):
            assert streams == simulate(order, some)
            assert sent == num_bytes
    found = [streams.makespan / MS for _, streams, _ in out[0][:7]]
    assert found[:3] == [4 * (6 * work + 4 * comm) for work in (12, 6, 4)]
    assert found[4:7] == [forms.overlap_makespan(4, work, comm) for work in (12, 6, 4)]


@pytest.mark.parametrize(("name", "num_ranks", "layers_per_stage"), [("dualpipe", 2, 2), ("dualpipev", 2, 1)])
def test_pipelines_overlap_with_the_same_bits_in_the_simulated_time(name, num_ranks, layers_per_stage):
    program = schedules.build(name, num_ranks, 6)
    weights = emulated.make_weights(program.num_stages * layers_per_stage)
    batch = torch.randn(2, 2, 6, SIZES.tokens, SIZES.hidden, dtype=torch.float64)
    work, comm = 4 * MS, 4 * MS
    link = lab.NodeLink(SIZES.link(comm / MS), lab.Link(gbps=1e9), ranks_per_node=2)
    runs, ranks = {}, range(num_ranks)
    for hook in (run_pair_serially, overlapped_forward_backward):
        options = {"even": True, "ticks": ticks_of(work, comm), "hook": hook}
        arguments = program, weights, SIZES, batch, options
        runs[hook] = out = lab.launch(pipeline, 2 * num_ranks, *arguments, clock="virtual", link=link)
        size = layers_per_stage, work, comm
        forward, backward = forms.forward_makespan(*size), forms.backward_makespan(*size)
        cost = lab.Cost(
            F=forward, B=backward, W=4 * layers_per_stage * work // 2, I=2 * layers_per_stage * (work + comm),
            overlap=forms.overlap_makespan(*size) if hook is overlapped_forward_backward else forward + backward,
        )  # fmt: skip
        # without a hook of its own a pair runs in turn, and its forward's result leaves first
        run = (
            program
            if hook is overlapped_forward_backward
            else program.with_ranks(map(list, map(program.actions, ranks)))
        )
        assert out.timeline.steps()[0].makespan == lab.simulate(run, cost, unit="ns").makespan
    serial, overlapped = runs.values()
    for ours, theirs in zip(overlapped, serial, strict=True):
        assert ours[1] == theirs[1] == 2 * num_ranks // (1 if name == "dualpipev" else 2) + 1
        for index, grads in ours[0].items():
            assert all(map(torch.equal, grads, theirs[0][index]))
    check_against_one_process(program, weights, batch, [results[0] for results in overlapped])


def check_against_one_process(program, weights, batch, grads):
    fixed, number = emulated.even_choices(SIZES), program.num_microbatches
    leaves_of(weights)
    for inputs, targets in batch:
        for x, y in zip(inputs, targets, strict=True):
            (mse_loss(emulated.single_process(weights, x, fixed), y) / number).backward()
    per_stage = len(weights) // program.num_stages
    for pp_rank in range(program.num_ranks):
        ours = grads[2 * pp_rank : 2 * pp_rank + 2]
        for index in ours[0]:
            for place, leaf in enumerate(leaves_of(weights[index * per_stage : (index + 1) * per_stage])):
                assert close(whole([rank[index] for rank in ours], place), leaf.grad)


@pytest.mark.parametrize("is_overlappable", [True, False])
def test_a_pair_with_an_input_gradient_leaves_its_weight_gradients_for_later(is_overlappable):
    """A stage in one piece runs its pair one after the other."""
    weights, linear = emulated.make_weights(2), nn.Linear(SIZES.hidden, SIZES.hidden).double()

    def fn(rank, world_size, hook):
        x = torch.randn(2, SIZES.tokens, SIZES.hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        layers = [PlainLayer(lambda _, x: {"x": x.tanh()}), *emulated.make_layers(weights)]
        stage = OverlappableStage(1, layers) if is_overlappable else Stage(1, linear)
        stage.forward(0, (x[0],))
        up = ReadyAction(stage, lab.Action(1, "F", 1), (x[1],))
        down = ReadyAction(stage, lab.Action(1, "I", 0), (x[1],))
        hook(up, down)
        assert stage.num_live == 2
        held = [ref(one) for one in getattr(stage, "passes", {}).values()]
        before = [*stage.module.parameters()][-1].grad
        stage.weight_grad(0)
        found = [*up.result, *down.result, *stage.backward(1, (x[0],))]
        assert stage.num_live == 0
        assert all(one() is None for one in held), "freed without a garbage collector"
        return before, found + [p.grad for p in stage.module.parameters()]

    serial, overlapped = (lab.launch(fn, 1, hook)[0] for hook in (run_pair_serially, overlapped_forward_backward))
    assert serial[0] is None
    assert overlapped[0] is None
    assert all(map(torch.equal, overlapped[1], serial[1]))


def test_wrong_calls_are_named():
    def fn(rank, world_size):
        layers = emulated.make_layers(emulated.make_weights(1))
        passage = MicrobatchPass(layers, torch.randn(2, 16, dtype=torch.float64))
        with pytest.raises(ValueError, match="'1F1B overlap' takes a MicrobatchPass for its forward and its backward"):
            execute(one_f_one_b_overlap(1), forward=passage)
        with pytest.raises(ValueError, match="'forward' takes a MicrobatchPass for its forward, and no other"):
            execute(forward_alone(1), forward=passage, backward=passage)
        stage, x = OverlappableStage(2, layers), torch.randn(2, 16, dtype=torch.float64)
        with pytest.raises(ValueError, match="stage 2 take x and padding alone, got more inputs: text"):
            stage.forward(0, (x,), extra={"text": x})
        with pytest.raises(ValueError, match="stage 2 take x alone, got more inputs: a tensor"):
            stage.forward(0, (x, x))
        up, down = (ReadyAction(stage, lab.Action(2, kind, n), (x,), {"text": x}) for kind, n in (("F", 1), ("B", 0)))
        stage.forward(0, (x,))
        with pytest.raises(ValueError, match="got more inputs: text"):
            overlapped_forward_backward(up, down)

    lab.launch(fn, 1)
