"""Column- and row-parallel layers against one whole layer: values, raw gradients, bytes, refusals."""

from inspect import signature

import pytest
import torch
from runs import RANKS, assert_a1, assert_refused, counted, distance, distances, draw, launch, leaf
from torch import nn
from tp_runs import TOKENS, local, modes, oracle, step, tensor

from dualpipe_lab import comm
from dualpipe_lab.ep import DeepSeekRouter, ExpertParallel, Experts, GShardMoE, TopKRouter
from dualpipe_lab.tp import (
    ColumnParallelLinear,
    GroupedQueryAttention,
    LatentAttention,
    LatentSizes,
    LMHead,
    RMSNorm,
    RowParallelLinear,
    SwiGLU,
    TensorParallel,
    VocabParallelEmbedding,
    full_state_dict,
    load_full_state_dict,
)

LAYERS = [(8, 12), (5, 7), (3, 2)]  # inputs, outputs: on 3 ranks 7 is cut into 3 3 1, 2 into 1 1 0


def whole_layer(inputs, outputs, bias):
    layer = nn.Linear(inputs, outputs, bias, dtype=torch.float64)
    for number, parameter in enumerate(layer.parameters()):
        parameter.data = draw(100 + number, *parameter.shape)
    return layer


def plain(full, x, dy):
    """Output, gradients of the input and of the parameters."""
    x = leaf(x)
    y = full(x)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad} | {name: parameter.grad for name, parameter in full.named_parameters()}


def column_case(tp, inputs, outputs, bias, shape, gather_output=False):
    full = whole_layer(inputs, outputs, bias)
    x, dy = draw(1, *shape, inputs), draw(2, *shape, outputs)
    expected = plain(full, x, dy)
    layer = ColumnParallelLinear.from_full(full, tp, gather_output=gather_output)
    cut = tp.sequence_parallel
    found = step(layer, local(x, -2, tp, cut), dy if gather_output else local(dy, -1, tp))
    expected["y"] = expected["y"] if gather_output else local(expected["y"], -1, tp)
    expected["dx"] = local(expected["dx"], -2, tp, cut)
    return distances(found, expected)


def row_case(tp, inputs, outputs, bias, shape):
    full = whole_layer(inputs, outputs, bias)
    x, dy = draw(1, *shape, inputs), draw(2, *shape, outputs)
    expected = plain(full, x, dy)
    cut = tp.sequence_parallel
    found = step(RowParallelLinear.from_full(full, tp), local(x, -1, tp), local(dy, -2, tp, cut))
    expected["y"], expected["dx"] = local(expected["y"], -2, tp, cut), local(expected["dx"], -1, tp)
    return distances(found, expected)


@pytest.mark.parametrize("world_size", RANKS)
def test_both_layers_equal_one_whole_layer(world_size):
    def fn(rank, world_size):
        found = {}
        for name, tp in modes().items():
            for sizes in LAYERS:
                for bias, shape in ((False, (TOKENS,)), (True, (2, TOKENS))):
                    found["column", name, sizes, bias] = column_case(tp, *sizes, bias, shape)
                    found["row", name, sizes, bias] = row_case(tp, *sizes, bias, shape)
            found["gathered", name] = column_case(tp, 5, 12, True, (2, TOKENS), gather_output=True)
        return found

    assert_a1(launch(fn, world_size))


@pytest.mark.parametrize("world_size", RANKS[1:])
def test_whole_numbers_give_the_same_bits(world_size):
    """The oracle's column and row pair: f and g stand once each, partial sums are those of the oracle."""
    block = oracle("integer_col_row")

    def fn(rank, world_size):
        tp, found = TensorParallel(), {}
        x = leaf(tensor(block["x"]))
        layers = []
        for kind, name in ((ColumnParallelLinear, "W_col"), (RowParallelLinear, "W_row")):
            weight = tensor(block[name])
            full = nn.Linear(*reversed(weight.shape), bias=False, dtype=torch.float64)
            full.weight.data = weight
            layers.append(kind.from_full(full, tp))
        y = layers[1](layers[0](x))
        y.backward(tensor(block["dy"]))
        found = {"y": y.detach(), "dx": x.grad}
        for layer, name in zip(layers, ("dW_col", "dW_row"), strict=True):
            found[name] = full_state_dict(layer, of="grad")["weight"]
        back = [full_state_dict(layer)["weight"].tolist() for layer in layers]
        partial = (x.detach() @ layers[0].weight.t() @ layers[1].weight.t()).detach()
        return {name: value.tolist() for name, value in found.items()}, partial.tolist(), back

    for rank, (found, partial, back) in enumerate(launch(fn, world_size)):
        assert found == block["expected"]
        assert partial == block["partials"][str(world_size)]["y"][rank]
        assert back == [block["W_col"], block["W_row"]]


def test_a_pair_of_layers_sends_one_sum_each_way():
    """T * h * bytes are summed once forward and once backward; sequence parallelism sends as many, or half again."""
    tokens, hidden, wide = 12, 8, 16
    whole = tokens * hidden * 8

    def pair(tp):
        layers = nn.Sequential(
            ColumnParallelLinear(hidden, wide, bias=False, tp=tp), RowParallelLinear(wide, hidden, bias=False, tp=tp)
        )
        x = leaf(local(draw(1, tokens, hidden), -2, tp, tp.sequence_parallel))
        layers.double()(x).sum().backward()

    def fn(rank, world_size):
        return {mode: counted(lambda tp=tp: pair(tp)) for mode, tp in modes().items()}

    for world_size in (2, 4):
        part = whole * (world_size - 1) // world_size
        for found in launch(fn, world_size):
            assert found == {
                "plain": {"all_reduce": (2, 4 * part)},
                "in turn": {"all_reduce": (2, 4 * part)},
                "sequence": {"all_gather_single": (3, 3 * part), "reduce_scatter_single": (2, 2 * part)},
                "sequence, kept": {"all_gather_single": (2, 2 * part), "reduce_scatter_single": (2, 2 * part)},
            }


def test_arguments_are_left_alone():
    def fn(rank, world_size):
        worst = 0.0
        for tp in modes().values():
            for kind, inputs in ((ColumnParallelLinear, 4), (RowParallelLinear, 2)):
                layer = kind(4, 4, tp=tp).double()
                x, dy = leaf(draw(rank, 2, 4, inputs)), None
                y = layer(x)
                kept = x.detach().clone()
                dy = draw(rank + 9, *y.shape)
                before = dy.clone()
                y.backward(dy)
                worst = max(worst, distance(x.detach(), kept), distance(dy, before))
        return worst

    assert launch(fn, 2) == [0.0, 0.0]


def load(layer, full):
    load_full_state_dict(layer, full.state_dict())


def test_what_does_not_fit_is_refused():
    cases = [
        (lambda: ColumnParallelLinear(4, 7, gather_output=True), "divide among the ranks, got 7 on 2 ranks"),
        (lambda: load(ColumnParallelLinear(4, 6), nn.Linear(4, 7)), "needs 6 along axis 0"),
        (lambda: load(RowParallelLinear(4, 6), nn.Linear(4, 6, False)), r"differs .* in \['bias'\]"),
        (lambda: load(RowParallelLinear(4, 6), nn.Linear(4, 7)), r"needs shape \(6, 2\) .* \(7, 2\)"),
        (
            lambda: RowParallelLinear(4, 4, tp=TensorParallel(sequence_parallel=True))(torch.ones(5, 2)),
            "divides among the ranks, got 5 on 2 ranks; pad it to 6",
        ),
        (lambda: ColumnParallelLinear(4, 6)(torch.ones(4)), r"got shape \(4,\); pass x\[None\]"),
        (lambda: RowParallelLinear(4, 6)(torch.ones(2)), r"got shape \(2,\); pass x\[None\]"),
    ]
    assert_refused(2, cases)


BY_KEYWORD = {
    ColumnParallelLinear: (8, 8), RowParallelLinear: (8, 8), SwiGLU: (8, 16), RMSNorm: (8, 1e-6), LMHead: (8, 16),
    VocabParallelEmbedding: (16, 8), GroupedQueryAttention: (8, 2, 2, 4),
    LatentAttention: (8, 2, LatentSizes(None, 4, 4, 4, 4)), Experts: (8, 8, 4), TopKRouter: (8, 4, 2),
    DeepSeekRouter: (8, 4, 2, 1, 1), GShardMoE: (8, 8, 4, 4, 2, 1),
}  # fmt: skip
PARALLEL = {"tp": TensorParallel, "ep": ExpertParallel}


def test_behind_the_sizes_everything_goes_by_keyword_and_a_bare_group_is_no_tp():
    """`ColumnParallelLinear(8, 8, TensorParallel(g))` once took the group for `bias`, and sharded over the world."""

    def fn(rank, world_size):
        group = comm.new_group([rank], members_only=True)
        for layer, sizes in BY_KEYWORD.items():
            name = next((name for name in PARALLEL if name in signature(layer).parameters), None)
            with pytest.raises(TypeError, match="positional argument"):
                layer(*sizes, TensorParallel(group))
            if name:
                with pytest.raises(TypeError, match=r"got ProcessGroup\w*; pass .p=\w+Parallel\(group\)"):
                    layer(*sizes, **{name: group})
            assert layer(*sizes, **({name: PARALLEL[name](group)} if name else {}))
        full = nn.Linear(8, 8).double()
        assert torch.equal(ColumnParallelLinear.from_full(full, TensorParallel(group)).weight, full.weight)
        assert LMHead.from_full(nn.Linear(8, 8, bias=False), TensorParallel(group)).weight.shape == (8, 8)

    launch(fn, 2)
