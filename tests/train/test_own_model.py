"""`train.run` with a model, a loss and batches of the user's own."""

import random
import shutil

import numpy
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import dualpipe_lab as lab

WIDTH, ROWS = 6, 16


def make_stages(plan):
    number = plan.program.num_stages if plan.program else 1
    layers = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    size = 4 // number
    return [nn.Sequential(*layers[i * size : (i + 1) * size]).double() for i in range(number)]


def batches():
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(2, ROWS, WIDTH, dtype=torch.float64, generator=generator).unbind() for _ in range(3)]


class Shuffled(torch.utils.data.DataLoader):
    """Rows in an order that torch's own generator draws when it begins."""

    def __init__(self):
        rows = [tuple(pair) for x, y in batches() for pair in zip(x, y, strict=True)]
        super().__init__(rows, batch_size=ROWS, shuffle=True)


def alone(steps, data=None, loss_fn=mse_loss, **changed):
    """The same training in plain torch: losses and weights."""
    data = data or batches()
    torch.manual_seed(7)
    model = nn.Sequential(*make_stages(lab.Plan()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    losses = []
    for step in range(steps):
        x, y = data[step % len(data)]
        if step == 2:
            optimizer.param_groups[0].update(changed)
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(model.named_parameters())


def options(**others):
    return {"loss": mse_loss, "seed": 7, "lr": 0.01, "weight_decay": 0.1, "max_norm": 0.1, "log_every": 0, **others}


@pytest.mark.parametrize(
    "plan",
    [
        lab.Plan(dp=2, num_microbatches=2, zero=3),
        lab.Plan(pp=2, dp=2, num_microbatches=4, zero=1),
        lab.Plan(pp=2, num_microbatches=4, schedule="dualpipev", zero=2),
    ],
    ids=str,
)
def test_losses_and_weights_are_those_of_one_process(plan, tmp_path):
    first = lab.train.run(make_stages, plan, batches, steps=2, folder=tmp_path, **options())
    rest = lab.train.run(make_stages, plan, batches(), steps=5, resume=tmp_path, weights=True, **options())
    losses, weights = alone(5)
    assert [*first.losses, *rest.losses] == pytest.approx(losses, abs=1e-12)
    found = {name: tensor.shape for name, tensor in rest.state.items()}
    assert sum(shape.numel() for shape in found.values()) == sum(w.numel() for w in weights.values())
    ours = torch.cat([rest.state[name].flatten() for name in sorted(rest.state, key=place)])
    theirs = torch.cat([w.detach().flatten() for w in weights.values()])
    assert float((ours - theirs).abs().max()) < 1e-12


def place(name):
    """Stages, layers and parts in the order of the model."""
    stage, layer, part, kind = name.split(".")
    return int(stage), int(layer), int(part), kind == "bias"


@pytest.mark.parametrize(
    "named",
    [{}, {"weight_decay": 2.0}, {"betas": (0.5, 0.6)}, {"eps": 0.1}, {"lr": 0.1}, {"lr": 0.1, "weight_decay": 0.0}],
    ids=str,
)
def test_a_resume_keeps_the_numbers_that_it_does_not_name_and_uses_those_that_it_names(named, tmp_path):
    plan, rest = lab.Plan(dp=2, zero=2), {"loss": mse_loss, "seed": 7, "log_every": 0}
    lab.train.run(make_stages, plan, batches(), steps=2, folder=tmp_path, **options())
    result = lab.train.run(make_stages, plan, batches(), steps=5, resume=tmp_path, **rest, **named)
    assert result.losses == pytest.approx(alone(5, **named)[0][2:], abs=1e-12)
    with pytest.raises(ValueError, match="was saved with seed=7, got seed=8; use it with seed=7"):
        lab.train.run(make_stages, plan, batches(), steps=5, resume=tmp_path, **rest | {"seed": 8})


def test_targets_of_minus_100_are_left_out_as_in_one_process():
    """Of the four microbatches one has no target at all, and the others have 1 to 4."""
    x = batches()[0][0]
    y = torch.tensor([0, 1, 2, 3, -100, -100, -100, -100, 4, -100, 5, -100, 0, -100, -100, -100])
    plan = lab.Plan(pp=2, dp=2, num_microbatches=2)
    result = lab.train.run(make_stages, plan, [(x, y)], steps=2, **options(loss=cross_entropy))
    assert result.losses == pytest.approx(alone(2, [(x, y)], cross_entropy)[0], abs=1e-12)


@pytest.mark.parametrize(
    "plan", [lab.Plan(pp=2, dp=2, num_microbatches=2, zero=3), lab.Plan(num_microbatches=4)], ids=str
)
def test_a_loss_over_something_else_counts_over_all_data_ranks(plan):
    """With class 0 as padding: four microbatches with other counts; as a mean it is refused."""
    x, y = batches()[0][0], torch.arange(ROWS) % 5
    y[:5] = 0

    def pair(output, target):
        return cross_entropy(output, target, ignore_index=0, reduction="sum"), (target != 0).sum()

    def mean(output, target):
        return cross_entropy(output, target, ignore_index=0)

    result = lab.train.run(make_stages, plan, [(x, y)], steps=2, **options(loss=pair))
    assert result.losses == pytest.approx(alone(2, [(x, y)], mean)[0], abs=1e-12)
    with pytest.raises(lab.RankError, match=r"as the mean over its halves.*return \(sum, count\)"):
        lab.train.run(make_stages, plan, [(x, y)], steps=2, **options(loss=mean))


def test_ranks_read_the_same_batches_from_a_loader_that_shuffles_and_are_told_of_others():
    result = lab.train.run(make_stages, lab.Plan(dp=2), Shuffled(), steps=4, **options())
    assert len(set(result.losses)) == 4
    first, *rest = batches()
    with pytest.raises(lab.RankError, match="read another batch of step 1 than rank 0"):
        lab.train.run(make_stages, lab.Plan(dp=2), lambda: [first, *rest][lab.comm.get_rank() :], steps=1, **options())


def shuffled_at_once(draw):
    """A round of batches whose order is drawn when it begins, as a user's function does."""
    rows = [*batches(), *batches()[:2]]
    draw(rows)
    return rows


def noisy(draw):
    """A round of batches that are each changed when they are read."""
    return ((x + draw(), y) for x, y in batches())


DRAWN = {
    "random.shuffle": lambda: shuffled_at_once(random.shuffle),
    "numpy.random.shuffle": lambda: shuffled_at_once(lambda rows: rows.sort(key=lambda row: numpy.random.rand())),
    "random.random": lambda: noisy(random.random),
    "numpy.random.rand": lambda: noisy(numpy.random.rand),
    "torch.rand": lambda: noisy(lambda: float(torch.rand(()))),
}


class Noisy(nn.Module):
    """A stage that draws by numpy, and whose weights are drawn by it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(numpy.random.rand(WIDTH) + random.random()))

    def forward(self, x):
        return x * self.weight + numpy.random.rand() + random.random()


@pytest.mark.parametrize("name", DRAWN)
def test_what_random_and_numpy_draw_follows_the_seed_and_a_resume_repeats_and_omits_nothing(name, tmp_path):
    """Seven steps are more than a round; the samples of each step show in its loss."""

    def losses(plan=lab.Plan(dp=2), **others):  # noqa: B008
        return lab.train.run(lambda plan: [Noisy()], plan, DRAWN[name], **options(**others)).losses

    straight = losses(steps=7, folder=tmp_path / "a", save_every=2)
    assert len(set(straight)) == 7
    assert losses(steps=7) == straight
    shutil.rmtree(tmp_path / "a" / "step-00000007")
    shutil.rmtree(tmp_path / "a" / "step-00000006")
    assert losses(steps=7, resume=tmp_path / "a") == straight[4:]
    assert losses(steps=1, seed=8) != straight[:1]


def test_a_smaller_last_batch_that_does_not_divide_is_to_be_left_out():
    """48 rows in batches of 18 leave 12, which 2 x 4 microbatches cannot share; a loader tells before any process."""
    plan, rows = lab.Plan(dp=2, num_microbatches=4), Shuffled().dataset
    loader = torch.utils.data.DataLoader(rows, batch_size=18)
    with pytest.raises(
        ValueError, match=r"12 rows and the others 18, and 12 rows do not split into 8 .* drop_last=True"
    ):
        lab.train.run(make_stages, plan, loader, steps=3, **options())
    two = lab.Plan(dp=2)  # 9 + 9 rows
    assert len(lab.train.run(make_stages, two, loader, steps=3, **options()).losses) == 3
    words = (
        "step 2: a batch of 5 rows does not split into 2 equal microbatches; leave out a smaller last .* drop_last=True"
    )
    with pytest.raises(lab.RankError, match=words):
        lab.train.run(
            make_stages,
            two,
            lambda: [torch.zeros(2, n, WIDTH).double().unbind() for n in (16, 5)],
            steps=2,
            **options(),
        )
    with pytest.raises(lab.RankError, match="5 rows does not split into 2 equal microbatches; use 1, 5"):
        lab.train.run(make_stages, two, [torch.zeros(2, 5, WIDTH).double().unbind()], steps=2, **options())


def tied_stages(plan):
    """Stages that have a parameter in common."""
    first, second = (nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False).double()) for _ in range(2))
    second[0].weight = first[0].weight
    return [first, second]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"config": tied_stages, "plan": lab.Plan(pp=2)},
            "0.weight of stage 0 and 0.weight of stage 1 are one parameter",
        ),
        ({"loss": None}, "an own model needs its loss"),
        ({"data": iter([])}, "each rank reads it from the beginning"),
        ({"data": b"text"}, "reads batches"),
        ({"evaluation": b"A"}, r"run\(evaluation=\) is for the library's models"),
        ({"elastic": True}, r"run\(elastic=\)"),
        ({"plan": lab.Plan(recompute=True)}, r"Plan\(recompute=\) is for the library's models"),
        ({"plan": lab.Plan(cp=2)}, "shards sequences"),
        ({"steps": 0}, "at least 1 step"),
        ({"data": []}, "the data has no batch"),
        ({"data": [torch.zeros(4, 6)]}, r"a batch is a pair \(x, y\), got Tensor"),
        ({"plan": lab.Plan(dp=3)}, "a batch of 16 rows does not split into 3"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_be_is_told_in_one_sentence(change, says):
    chosen = {"config": make_stages, "plan": lab.Plan(), "data": batches, "steps": 1, **options(), **change}
    with pytest.raises((ValueError, lab.RankError), match=says):
        lab.train.run(chosen.pop("config"), chosen.pop("plan"), chosen.pop("data"), **chosen)


class Rows(nn.Module):
    """A table in fp16, of which two rows of three are never looked up."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(3, WIDTH, dtype=torch.float16)

    def forward(self, x):
        return self.table(x[:, 0]).float()


def test_weights_in_fp16_have_masters_and_stay_finite_where_no_gradient_is():
    data = [(torch.zeros(4, 1, dtype=torch.long), torch.zeros(4, WIDTH))]
    result = lab.train.run(lambda plan: [Rows()], lab.Plan(dp=2), data, steps=3, weights=True, **options())
    weight = result.state["0.table.weight"]
    assert weight.dtype == torch.float32
    assert weight.isfinite().all()


class Late(nn.Module):
    """A stage with a buffer that is unlike on the ranks from the third step on."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x):
        self.seen[0] += 1
        self.seen[1] = 5 * lab.comm.get_rank() if self.seen[0] > 2 else 0
        return self.layer(x)


def with_a_buffer(buffer):
    stage = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    stage.register_buffer("kept", buffer)
    return [stage]


UNSAVEABLE = {
    "running_mean has other values on rank 1": lambda plan: [nn.BatchNorm1d(WIDTH, dtype=torch.float64)],
    "kept is complex64, which safetensors cannot hold": lambda plan: with_a_buffer(
        torch.zeros(2, dtype=torch.complex64)
    ),
}


@pytest.mark.parametrize("says", UNSAVEABLE)
@pytest.mark.parametrize("kept", ["folder", "weights"])
def test_what_no_save_could_keep_is_refused_by_the_first_step(says, kept, tmp_path):
    """The second batch would be an error of its own."""
    data, chosen = [batches()[0], None], {"folder": {"folder": tmp_path}, "weights": {"weights": True}}[kept]
    with pytest.raises(lab.RankError, match=says):
        lab.train.run(UNSAVEABLE[says], lab.Plan(dp=2), data, steps=3, **options(**chosen))
    if "complex" in says:  # the types of buffers are known before
        with pytest.raises(lab.RankError, match=says):
            lab.train.run(UNSAVEABLE[says], lab.Plan(dp=2), [None], steps=3, **options(**chosen))


@pytest.mark.parametrize(("plan", "every"), [(lab.Plan(dp=2, zero=3), None), (lab.Plan(dp=2), 3)], ids=str)
def test_a_save_that_fails_after_the_first_step_loses_nothing(plan, every, tmp_path):
    """At the end, and on the way: the metrics and the weights are those of a training that saves nothing."""
    with pytest.warns(UserWarning, match="other values on rank 1 than .*\n.*its metrics and weights are in the result"):
        result = lab.train.run(
            lambda plan: [Late()], plan, batches, steps=4, **options(folder=tmp_path, save_every=every)
        )
    assert result.problem.startswith("tensor buffer/0.seen has other values")
    assert (result.checkpoint, result.exit_code, result.interrupted) == (None, 1, every == 3)
    straight = lab.train.run(
        lambda plan: [Late().layer], lab.Plan(), batches, steps=len(result.losses), weights=True, **options()
    )
    assert len(result.losses) == (every or 4)
    assert result.losses == pytest.approx(straight.losses, abs=1e-12)
    weights = {name.replace("layer.", ""): weight for name, weight in result.weights().items()}
    assert weights.keys() == straight.state.keys()
    assert all(torch.allclose(weights[name], straight.state[name], atol=1e-12, rtol=0) for name in weights)
