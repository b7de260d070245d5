"""A loss that is a mean over something else than its targets' elements: (sum, count), or a refusal in step 1."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dualpipe_lab as lab
from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.runtime.check import check
from dualpipe_lab.pp.runtime.runtime import PipelineRuntime

M, ROWS, CLASSES = 4, 12, 5
RATES = torch.linspace(0.5, 2.5, CLASSES, dtype=torch.float64)


def by_row(y, target, **options):
    return cross_entropy(y, target, reduction="none", **options)


PADDED, WEIGHTED = {"ignore_index": 0}, {"weight": RATES}
MEANS = {  # a loss, the same as (sum, count)
    "another index is ignored": (
        lambda y, t: cross_entropy(y, t, **PADDED),
        lambda y, t: (by_row(y, t, **PADDED).sum(), (t != 0).sum()),
    ),
    "class weights": (
        lambda y, t: cross_entropy(y, t, **WEIGHTED),
        lambda y, t: (by_row(y, t, **WEIGHTED).sum(), RATES[t].sum()),
    ),
    "a mask in the targets": (
        lambda y, t: (by_row(y, t[0]) * t[1]).sum() / t[1].sum(),
        lambda y, t: ((by_row(y, t[0]) * t[1]).sum(), t[1].sum()),
    ),
}
OTHERS = {  # no mean of a batch
    "a sum": lambda y, t: cross_entropy(y, t, reduction="sum"),
    "a mean beside a count": lambda y, t: (cross_entropy(y, t), len(t)),
    "samples that depend on each other": lambda y, t: cross_entropy(y @ y.T, torch.arange(len(y))),
}


def stages(number):
    torch.manual_seed(1)
    return [nn.Sequential(nn.Linear(CLASSES, CLASSES), nn.Tanh()).double() for _ in range(number)]


def batch(name):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(ROWS, CLASSES, dtype=torch.float64, generator=generator)
    t = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    t[:2] = 0
    return x, (t, (t > 1).double()) if "mask" in name else t


def step(program, rank, loss, name, **options):
    mine = {index: stage for index, stage in enumerate(stages(program.num_stages)) if (index, rank) in placed(program)}
    result = PipelineRuntime(program, mine, loss).step(*batch(name), **options)
    grads = {(i, name): p.grad for i, stage in mine.items() for name, p in stage.named_parameters()}
    return grads, float(sum(part.detach() for part in result.losses.values()))


def placed(program):
    return {(stage, rank) for (stage, _), rank in program.placement.items()}


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_h1", "dualpipe", "dualpipev"])
def test_a_loss_that_returns_sum_and_count_is_that_of_one_process(schedule):
    program = schedules.build(schedule, 2, M)

    def fn(rank, world_size):
        return {name: step(program, rank, pair, name) for name, (_, pair) in MEANS.items()}

    found = lab.launch(fn, 2, output="collect")
    for name, (loss, pair) in MEANS.items():
        whole = stages(program.num_stages)
        x, t = batch(name)
        right = loss(nn.Sequential(*whole)(x), t)
        right.backward()
        assert abs(sum(float(each[name][1]) for each in found) - right.item()) < 1e-14
        for (index, key), grad in (item for each in found for item in each[name][0].items()):
            assert (grad - whole[index].get_parameter(key).grad).abs().max() < 1e-14, (name, index, key)
        check(program, stages(program.num_stages), pair, *batch(name))


def test_other_means_are_refused_in_the_first_step_unless_shares_are_given():
    program = schedules.build("gpipe", 1, M)

    def fn(rank, world_size):
        losses = {name: loss for name, (loss, _) in MEANS.items()} | OTHERS
        for name, loss in losses.items():
            for act in (
                lambda: step(program, 0, loss, name),  # noqa: B023
                lambda: check(program, stages(1), loss, *batch(name)),  # noqa: B023
            ):
                with pytest.raises(ValueError, match=r"as the (mean|sum) over its halves.*return \(sum, count\)"):
                    act()
            step(program, 0, loss, name, weights=[1 / M] * M)
        grads, _ = step(program, 0, OTHERS["a sum"], "a sum", reduce="sum")
        module = stages(1)[0]
        x, t = batch("a sum")
        OTHERS["a sum"](module(x), t).backward()
        assert all(torch.allclose(grads[0, name], p.grad, rtol=1e-13) for name, p in module.named_parameters())

    lab.launch(fn, 1, output="collect")


def test_shares_that_cannot_be_known_are_refused():
    program = schedules.build("gpipe", 1, M)
    x, t = batch("")

    def fn(rank, world_size):
        runtime = PipelineRuntime(program, stages(1), lambda y, t: (by_row(y, t).sum(), (y > 0).sum()))
        with pytest.raises(ValueError, match="a count follows from the target alone"):
            runtime.step(x, t)
        xs, ts = ([part[first:last] for first, last in ((0, 2), (2, 4), (4, 6), (6, 12))] for part in (x, t))
        with pytest.raises(ValueError, match="for targets of one shape"):
            PipelineRuntime(program, stages(1), MEANS["class weights"][1]).step(xs, ts)
        some = t.clone()
        some[0] = -100
        with pytest.raises(ValueError, match="3 of 4 microbatches have targets on this rank, of 2, 3, 3 elements"):
            runtime.step(x, [*some.view(M, -1)[:-1], None])
        with pytest.raises(ValueError, match="reduce='sum' and weights, which are their shares"):
            runtime.step(x, t, [1.0] * M, reduce="sum")

    lab.launch(fn, 1, output="collect")


def test_unequal_microbatches_count_by_their_targets():
    program = schedules.build("gpipe", 1, 3)
    x, t = batch("")
    t[3:8] = -100
    rows = [slice(0, 1), slice(1, 7), slice(7, 12)]

    def fn(rank, world_size):
        module, other = stages(1)[0], stages(1)[0]
        PipelineRuntime(program, [module], cross_entropy).step([x[r] for r in rows], [t[r] for r in rows])
        cross_entropy(other(x), t).backward()
        return [
            float((a.grad - b.grad).abs().max()) for a, b in zip(module.parameters(), other.parameters(), strict=True)
        ]

    assert max(lab.launch(fn, 1, output="collect")[0]) < 1e-15
