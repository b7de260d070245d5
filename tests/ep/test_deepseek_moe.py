"""DeepSeek-V3's layer: weights without the bias, loads counted once, gradients of one process."""

import pytest
import torch
from ep_runs import distance
from runs import A1, counted, draw, launch, leaf
from torch.utils.checkpoint import checkpoint

from dualpipe_lab.ep.deepseek_moe import (
    DeepSeekRouter,
    bias_step,
    group_limited_topk,
    update_biases,
)
from dualpipe_lab.ep.router_losses import sequence_loss
from dualpipe_lab.pp.runtime.recompute import recompute

E, K, GROUPS, KEPT, HIDDEN, FFN, SCALE = 8, 2, 4, 2, 6, 5, 2.5


def test_the_bias_changes_the_choice_and_not_the_weights():
    router = DeepSeekRouter(HIDDEN, E, K, GROUPS, KEPT, scale=SCALE, dtype=torch.float64)
    x = draw(0, 50, HIDDEN)
    before = router(x)
    router.bias += 0.25  # the same for all: nothing changes
    assert torch.equal(router(x).indices, before.indices)
    router.bias[:] = draw(1, E)
    after = router(x)
    assert not torch.equal(after.indices, before.indices)
    scores = after.logits.sigmoid().gather(1, after.indices)
    assert distance(after.weights, SCALE * scores / scores.sum(1, keepdim=True)) <= A1
    assert "bias" not in dict(router.named_parameters())
    assert set(router.state_dict()) == {"weight", "bias"}  # a counter is no state


BELOW = "torch's checkpoint looks at the device of saved tensors below the stand-in's mode"


@pytest.mark.parametrize("again", ["not", pytest.param("torch", marks=pytest.mark.on_gloo(BELOW)), "ours"])
def test_a_load_is_counted_once_per_microbatch(again):
    """Also where the forward runs twice, and not at all without a backward."""

    def fn(rank, world_size):
        router = DeepSeekRouter(HIDDEN, E, K, GROUPS, KEPT, scale=SCALE, dtype=torch.float64)
        expected = torch.zeros(E, dtype=torch.int64)

        def weights(x):
            return router(x).weights

        for microbatch in range(3):
            x = leaf(draw(10 * rank + microbatch, 4 + rank, HIDDEN))
            if again == "torch":
                y = checkpoint(weights, x, use_reentrant=False)
            else:
                y = recompute(weights, x) if again == "ours" else weights(x)
            y.sum().backward()
            with torch.no_grad():
                expected += router(x).load  # an evaluation
        own, found = router.load.clone(), []
        sent = counted(lambda: found.extend(update_biases(router, 0.001)))
        return own.tolist(), expected.tolist(), found[0].tolist(), router.bias.tolist(), int(router.load.sum()), sent

    results = launch(fn, 2)
    total = [sum(column) for column in zip(*(own for own, *_ in results), strict=True)]
    assert sum(total) == 3 * K * (4 + 5)
    for own, expected, load, bias, left, sent in results:
        assert own == expected
        assert load == total
        assert bias == bias_step(torch.tensor(total), 0.001).tolist()
        assert left == 0
        assert sent == {"all_reduce": (1, E * 8)}


def test_two_routers_share_one_message_and_16_bits_are_refused():
    def fn(rank, world_size):
        model = torch.nn.ModuleList([DeepSeekRouter(4, 4, 2), DeepSeekRouter(4, 8, 2)])
        x = torch.ones(3, 4, requires_grad=True)
        (model[0](x).weights.sum() + model[1](x).weights.sum()).backward()
        sent = counted(lambda: update_biases(model, 0.1))
        nothing = update_biases(torch.nn.Linear(2, 2), 0.1)
        try:
            update_biases(model.bfloat16(), 0.1)
        except ValueError as error:
            return sent, nothing, str(error)

    for sent, nothing, error in launch(fn, 2):
        assert sent == {"all_reduce": (1, 12 * 8)}
        assert nothing == []
        assert "32 bits or more, got torch.bfloat16" in error


def plain_sequence_loss(logits, indices, length, scoring="sigmoid"):
    scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)
    shares = (scores / scores.sum(-1, keepdim=True)).unflatten(0, (-1, length)).mean(1)
    chosen = torch.nn.functional.one_hot(indices, logits.shape[1]).sum(1).to(logits.dtype)
    f = logits.shape[1] / indices.shape[1] * chosen.unflatten(0, (-1, length)).mean(1)
    return (f * shares).sum(1).mean()


@pytest.mark.parametrize("groups", [(1, 1), (GROUPS, KEPT)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_softmax_scores_are_selected_with_and_without_a_bias(groups, has_bias):
    router = DeepSeekRouter(
        HIDDEN, E, K, *groups, scale=SCALE, dtype=torch.float64, scoring="softmax", normalise=False, has_bias=has_bias
    )
    assert ("bias" in router.state_dict()) == has_bias
    if has_bias:
        router.bias.copy_(0.3 * draw(5, E))
    routing = router(draw(4, 40, HIDDEN))
    scores = routing.logits.softmax(-1)
    selection = scores + router.bias if has_bias else scores
    assert torch.equal(routing.indices, group_limited_topk(selection, K, *groups))
    assert distance(routing.weights, SCALE * scores.gather(1, routing.indices)) <= A1


def test_a_router_without_a_bias_has_its_load_returned_and_reset():
    def fn(rank, world_size):
        router = DeepSeekRouter(HIDDEN, E, K, dtype=torch.float64, scoring="softmax", has_bias=False)
        routing = router(draw(rank, 10, HIDDEN))
        routing.weights.sum().backward()
        (load,) = update_biases(router, 0.1)
        return load, routing.load, int(router.load.sum()), router.bias

    (load, one, *rest), (again, other, *_) = launch(fn, 2)
    assert torch.equal(load, one + other)
    assert torch.equal(load, again)
    assert rest == [0, None]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_the_loss_per_sequence_and_its_gradient(scoring):
    logits = draw(3, 12, E)
    indices = group_limited_topk(logits, K, GROUPS, KEPT)
    ours, theirs = leaf(logits), leaf(logits)
    loss, expected = sequence_loss(ours, indices, 4, scoring=scoring), plain_sequence_loss(theirs, indices, 4, scoring)
    (2 * loss).backward()
    (2 * expected).backward()
    assert distance(loss, expected) <= A1
    assert distance(ours.grad, theirs.grad) <= A1
    options = {"num_sequences": 3, "scoring": scoring}
    parts = [sequence_loss(logits[s], indices[s], 4, **options) for s in (slice(0, 8), slice(8, 12))]
    assert distance(sum(parts), expected) <= A1  # shares of two ranks
    assert float(sequence_loss(logits[:0], indices[:0], 4, num_sequences=3)) == 0
    even = torch.stack([torch.arange(E), (torch.arange(E) + 1) % E], 1)
    assert float(sequence_loss(torch.zeros(E, E), even, E)) == pytest.approx(1)
    with pytest.raises(ValueError, match="got 12 tokens in sequences of 5"):
        sequence_loss(logits, indices, 5)
