"""Pairs by DeepSeek's `overlapped_forward_backward`: equal to one process, or ended by one sentence."""

import pytest
import torch
from rank_runs import close, grads_of
from torch import nn
from torch.nn.functional import mse_loss

import dualpipe_lab as lab
from dualpipe_lab.pp import ModuleStage, Stage, WithLoss, run_pair_by_module
from dualpipe_lab.pp.schedules import build

WIDTH, ROWS = 4, 3


class Block(nn.Module):
    """Two tensors in and out: the second, row numbers, has no gradient."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, rows):
        return x + self.b(torch.tanh(self.a(x))) * (1 + rows[:, None]), rows

    @classmethod
    def overlapped_forward_backward(
        cls, module0, inputs0, criterion0, labels0, module1, loss1, outputs1, output_grads1
    ):
        """As DeepSeek's example: one half after the other, and the loss detached in place."""
        outputs0 = module0(*inputs0)
        loss0 = criterion0(*outputs0, *labels0) if criterion0 is not None else None
        if loss1 is not None:
            loss1.backward()
            loss1.detach_()
        else:
            torch.autograd.backward(outputs1, output_grads1)
        return outputs0, loss0


def loss_of(y, rows, target):
    return mse_loss(y * (1 + rows[:, None]), target)


def model_of(number):
    torch.manual_seed(0)
    return [Block().double() for _ in range(number)]


def batch_of(number):
    torch.manual_seed(1)
    x, y = torch.randn(2, number, ROWS, WIDTH, dtype=torch.float64)
    return [(one, torch.arange(ROWS)) for one in x], list(y)


def train(rank, world_size, program, model, batch, weights=None, loss=loss_of):
    stages = {i: ModuleStage(i, model[i]) for i in {*program.stages_of(rank)}}
    seen = []

    def hook(forward, backward):
        seen.append(backward.action)
        run_pair_by_module(forward, backward)

    result = lab.PipelineRuntime(program, stages, loss, overlapped=hook).step(*batch, weights=weights)
    assert not any(stage.live for stage in stages.values())
    return {i: grads_of(model[i]) for i in stages}, result.losses, len(seen)


def test_a_module_runs_its_pairs_and_equals_one_process(subtests):
    for name, p, m in (("dualpipe", 2, 6), ("dualpipev", 2, 6), ("paired_interleaved", 2, 4), ("paired_1f1b", 3, 6)):
        program, batch = build(name, p, m), batch_of(m)
        model = model_of(program.num_stages)
        weights = [0.0, *torch.linspace(0.1, 0.5, m - 1, dtype=torch.float64).tolist()]
        expected = []
        for (x, rows), y, weight in zip(*batch, weights, strict=True):
            for stage in model:
                x, rows = stage(x, rows)
            expected.append(weight * loss_of(x, rows, y))
        sum(expected).backward()
        theirs = [[grad.clone() for grad in grads_of(stage)] for stage in model]
        nn.ModuleList(model).zero_grad()
        with subtests.test(name):
            losses = {}
            for grads, mine, num_pairs in lab.launch(train, p, program, model, batch, weights):
                losses |= mine
                assert num_pairs
                for i in grads:
                    close(grads[i], theirs[i])
            close([losses[i] for i in range(m)], [loss.detach() for loss in expected])


class NoBackward(Block):
    @classmethod
    def overlapped_forward_backward(cls, module0, inputs0, criterion0, labels0, *backward):
        outputs0 = module0(*inputs0)
        return outputs0, criterion0(*outputs0, *labels0) if criterion0 else None


class OwnLoss(Block):
    @classmethod
    def overlapped_forward_backward(cls, module0, inputs0, criterion0, labels0, *backward):
        outputs0, loss0 = super().overlapped_forward_backward(module0, inputs0, criterion0, labels0, *backward)
        return outputs0, loss0 if criterion0 is None else loss_of(*outputs0, *labels0)  # not weighted


class Balanced(Block):
    def forward(self, x, rows):
        return WithLoss(super().forward(x, rows), x.square().mean())


class Without(nn.Module):
    def forward(self, x, rows):
        return x, rows


CASES = [
    (NoBackward, "has not run the backward of stage 1; call loss1.backward()"),
    (OwnLoss, "of stage 1 must return the loss that criterion0 has returned"),
    (Balanced, "takes and returns lists of tensors, and no dictionary, extra input or WithLoss"),
    (Without, "stage 0 is a Without, whose class has no overlapped_forward_backward"),
]


@pytest.mark.parametrize(("kind", "said"), CASES)
def test_what_the_method_cannot_do_right_ends_in_a_sentence(kind, said):
    program = build("dualpipev", 1, 3)
    with pytest.raises(lab.RankError, match="ValueError") as caught:
        lab.launch(train, 1, program, [kind().double(), kind().double()], batch_of(3))
    assert said in str(caught.value)


def test_a_pair_of_other_stages_is_refused():
    program, model = build("dualpipev", 1, 2), model_of(2)

    def mixed(rank, world_size, other):
        stages = {0: ModuleStage(0, model[0]), 1: other}
        lab.PipelineRuntime(program, stages, loss_of, overlapped=run_pair_by_module).step(*batch_of(2))

    for other, named in ((Stage(1, model[1]), "Stage(Block)"), (ModuleStage(1, OwnLoss().double()), "OwnLoss")):
        with pytest.raises(lab.RankError, match=r"stages 1 and 0 cannot run as a pair .* ModuleStage") as caught:
            lab.launch(mixed, 1, other)
        assert named in str(caught.value)
