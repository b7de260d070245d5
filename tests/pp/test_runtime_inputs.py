"""A whole batch, and the shares of its loss by the tokens of each microbatch."""

import pytest
import torch
from rank_runs import WIDTH, close, grads_of
from torch import nn
from torch.nn import functional

import dualpipe_lab as lab
from dualpipe_lab.dp import Zero1
from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.runtime import PipelineRuntime, split_batch
from dualpipe_lab.pp.schedules import build


def test_shares_by_tokens_and_a_microbatch_without_any():
    torch.manual_seed(0)
    stages = [nn.Embedding(5, WIDTH).double(), nn.Linear(WIDTH, 5).double()]
    tokens = [torch.tensor([1, 2, 3]), torch.tensor([4, 4, 0]), torch.tensor([0, 1, 1])]
    labels = [torch.tensor([2, -100, 1]), torch.tensor([-100] * 3), torch.tensor([1, 1, 1])]
    counts = [int((label >= 0).sum()) for label in labels]
    shares = [count / sum(counts) for count in counts]
    program = build("zero_bubble_h1", 2, 3)

    def fn(rank, world_size):
        runtime = PipelineRuntime(program, {rank: stages[rank]}, nn.functional.cross_entropy)
        result = runtime.step(tokens, labels, shares)
        return grads_of(stages[rank]), [float(loss) for loss in result.losses.values()]

    out = lab.launch(fn, 2)
    loss = functional.cross_entropy(nn.Sequential(*stages)(torch.cat(tokens)), torch.cat(labels))
    loss.backward()
    for (ours, _), stage in zip(out, stages, strict=True):
        close(ours, grads_of(stage))
    assert sum(out[1][1]) == pytest.approx(loss.item(), abs=1e-12)


class Pair(nn.Module):
    """A first stage with two inputs."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, z):
        return self.one(x).tanh() + self.two(z)


def pair_loss(y, targets):
    return functional.mse_loss(y, targets["near"]) + (y - targets["more"][0]).abs().mean()


def whole_batch():
    generator = torch.Generator().manual_seed(3)
    x, z, near, more = torch.randn(4, 8, WIDTH, dtype=torch.float64, generator=generator)
    return (x, z), {"near": near, "more": (more,)}


def pair_model(number):
    torch.manual_seed(0)
    return [Pair().double(), *(nn.Linear(WIDTH, WIDTH).double() for _ in range(number - 1))]


@pytest.mark.parametrize("name", ["1f1b", "dualpipe", "dualpipev"])
def test_a_whole_batch_is_split_and_its_loss_is_that_of_one_process(name):
    """Numbered by an nn.ModuleDict, which an optimizer takes too; or in an nn.ModuleList; or microbatches by hand."""
    program = build(name, 2, 4)
    first = {"dictionary": lambda x, z: {"x": x, "z": z}, "tuple": lambda x, z: (x, z)}

    def fn(rank, world_size):
        found = {}
        for kind in ("dictionary", "tuple", "list", "chunks"):
            model, (inputs, targets) = pair_model(program.num_stages), whole_batch()
            here = sorted({action.stage for action in program.actions(rank)})
            stages = nn.ModuleDict({str(number): model[number] for number in here})
            if kind == "list":
                stages = nn.ModuleList(stages.values())
            else:
                Zero1(stages, lab.Mesh(lab.Topology([("pp", 2)])), program=program)
            given = first[kind](*inputs) if kind in first else split_batch(inputs, 4)
            if kind == "chunks":
                given, targets = tuple(given), split_batch(targets, 4)
            runtime = PipelineRuntime(program, stages, pair_loss)
            if name == "1f1b" and kind == "tuple":  # each rank gives what it reads, as to torch's schedules
                result = runtime.step(given) if rank == 0 else runtime.step(targets=targets)
            else:
                result = runtime.step(given, targets)
            loss = None if result.loss is None else float(result.loss)
            found[kind] = {n: grads_of(model[n]) for n in here}, loss, float(sum(result.losses.values()))
            assert runtime.evaluate(given, targets).loss == result.loss
        return found

    model, (inputs, targets) = pair_model(program.num_stages), whole_batch()
    loss = pair_loss(nn.Sequential(*model[1:])(model[0](*inputs)), targets)
    loss.backward()
    out = lab.launch(fn, 2)
    has_last = {"1f1b": [False, True], "dualpipe": [False, False], "dualpipev": [True, False]}[name]
    for kind in out[0]:
        for rank, found in enumerate(out):
            grads, said, _ = found[kind]
            for number, ours in grads.items():
                close(ours, grads_of(model[number]))
            assert (said == pytest.approx(loss.item(), abs=1e-12)) if has_last[rank] else said is None
        assert sum(found[kind][2] for found in out) == pytest.approx(loss.item(), abs=1e-12)


def test_a_batch_that_would_train_on_something_else_is_refused(subtests):
    """With the rule, the values and the remedy; on one rank, which holds all stages."""
    linear, ids = nn.Linear(WIDTH, 5), torch.tensor([0, 1, 2, -100])

    def detached(y, target):
        return functional.cross_entropy(y.detach(), target)

    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.linear(x).detach()

    def fn(rank, world_size):
        x, y = torch.randn(4, WIDTH), torch.zeros(4, dtype=torch.int64)
        one, two = build("1f1b", 1, 2), Program.parse("two", ["0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1"])
        cross = functional.cross_entropy
        rows = {
            "4 rows does not split into 3 equal microbatches": (build("1f1b", 1, 3), {0: linear}, cross, (x, y)),
            "a tensor of shape () has none": (one, {0: linear}, cross, (x, torch.tensor(1))),
            "one number of rows, got [4, 6]": (one, {0: linear}, cross, ({"x": x, "m": torch.ones(6)}, y)),
            "and ndarray has none": (one, {0: linear}, cross, ({"x": x.numpy()}, y)),
            "holds stage 0, which needs inputs": (one, {0: linear}, cross, (None, y)),
            "holds the last stage, which needs targets": (one, {0: linear}, cross, (x,)),
            "got targets of 2, 1 elements": (one, {0: linear}, cross, (x, ids)),
            "the loss function returns a tensor without a graph": (one, {0: linear}, detached, (x, y)),
            "stage 0 returned tensors without a graph for microbatch 0": (
                two, {0: Frozen(), 1: linear}, cross, (x, y)
            ),
            "stage 1 returns a tensor without a graph": (two, [nn.Linear(WIDTH, WIDTH), Frozen()], cross, (x, y)),
            "give each module under its number": (one, linear, cross, (x, y)),
            "got the names ['head']": (one, nn.ModuleDict({"head": linear}), cross, (x, y)),
            "got 2 modules without numbers": (one, nn.ModuleList([linear, linear]), cross, (x, y)),
        }  # fmt: skip
        said = {}
        for message, (program, stages, loss_fn, batch) in rows.items():
            try:
                PipelineRuntime(program, stages, loss_fn).step(*batch)
                said[message] = "nothing"
            except ValueError as error:
                said[message] = str(error)
        runtime = PipelineRuntime(one, {0: linear}, cross)
        with torch.no_grad(), pytest.raises(ValueError, match="use evaluate"):
            runtime.step(x, y)
        runtime.step(x, ids, [2 / 3, 1 / 3])
        return said

    for message, said in lab.launch(fn, 1)[0].items():
        with subtests.test(message=message):
            assert message in said
