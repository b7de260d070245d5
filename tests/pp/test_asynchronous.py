"""Asynchronous pipelines on real ranks: trajectories of PipeDream, vertical sync, 2BW and no stashing at all."""

import json
import sys
from pathlib import Path

import pytest
import torch
from rank_runs import close, make_batch, make_stages
from torch import nn

import dualpipe_lab as lab
from dualpipe_lab.pp.runtime.asynchronous import AsynchronousRuntime, choose_versions
from dualpipe_lab.pp.schedules import build, dualpipe, pipedream
from dualpipe_lab.pp.schedules.pipedream import versions_kept

ORACLE = json.loads((Path(__file__).parents[1] / "oracles" / "pipedream.json").read_text())
ROUNDING = 7 * 8 * 1.3 * sys.float_info.epsilon  # 7 updates of some 8 operations each, on numbers up to 1.3


class Scalar(nn.Module):
    """y = w x."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight, dtype=torch.float64))

    def forward(self, x):
        return self.weight * x


def squared(y, target):
    return (y - target).square() / 2


class Noting(torch.optim.SGD):
    """Writes down every value of its first parameter."""

    def __init__(self, parameters, lr, history):
        super().__init__(parameters, lr)
        self.history = history
        self.note()

    def step(self):
        super().step()
        self.note()

    def note(self):
        self.history.append(self.param_groups[0]["params"][0].item())


def train(rule, update_every=1, number=None):
    p, number = ORACLE["p"], number or len(ORACLE["x"])
    data = [[torch.tensor(value, dtype=torch.float64) for value in ORACLE[key][:number]] for key in ("x", "target")]

    def fn(rank, world_size):
        module, history = Scalar(ORACLE["w0"][rank]), []
        runtime = AsynchronousRuntime(
            pipedream(p, number),
            {rank: module},
            squared,
            lambda ps: Noting(ps, ORACLE["lr"], history),
            rule,
            update_every,
        )
        result = runtime.run(*data)
        return history, [float(loss) for _, loss in sorted(result.losses.items())], runtime.versions_kept[rank]

    return lab.launch(fn, p)


def test_the_recorded_trajectories():
    for rule, kept in (("stash", ORACLE["versions_kept"]), ("vertical sync", None), ("naive", [1] * ORACLE["p"])):
        expected = ORACLE["expected"][rule.replace(" ", "_")]
        histories, losses, versions = zip(*train(rule), strict=True)
        assert list(histories) == [pytest.approx(row, abs=ROUNDING) for row in expected["weights"]]
        assert losses[-1] == pytest.approx(expected["losses"], abs=ROUNDING)
        assert kept in (None, list(versions))
    assert choose_versions(pipedream(3, 7), "stash") == ORACLE["version_used"]
    expected = ORACLE["expected"]["2bw"]
    histories, _, versions = zip(*train("2bw", expected["m"], 2 * expected["m"]), strict=True)
    for found, row in zip(zip(*histories, strict=True), expected["weights"], strict=True):
        assert list(found) == pytest.approx(row, abs=ROUNDING)
    assert versions == (2, 2, 2)


def partly_frozen(num_stages):
    stages = make_stages(num_stages)
    stages[0][0].bias.requires_grad_(False)
    return stages


def delayed(num_stages, batch, versions, update_every, lr, momentum):
    """The recursion by hand: gradients at old weights, added to the current ones with their momentum."""
    model = nn.Sequential(*partly_frozen(num_stages))
    history = [[[p.detach().clone() for p in stage.parameters()] for stage in model]]
    velocity = [[torch.zeros_like(p) for p in weights] for weights in history[0]]
    for start in range(0, len(batch[0]), update_every):
        for m in range(start, start + update_every):
            for stage, module in enumerate(model):
                for parameter, old in zip(module.parameters(), history[versions[stage][m]][stage], strict=True):
                    parameter.data = old.clone()
            (nn.functional.mse_loss(model(batch[0][m]), batch[1][m]) * (1 / update_every)).backward()
        for moving, module in zip(velocity, model, strict=True):
            for v, p in zip(moving, module.parameters(), strict=True):
                v.mul_(momentum).add_(0 if p.grad is None else p.grad)
        newest = [[w - lr * v for w, v in zip(*pair, strict=True)] for pair in zip(history[-1], velocity, strict=True)]
        history.append(newest)
        model.zero_grad()
    return history[-1]


@pytest.mark.parametrize(
    ("name", "num_ranks", "rule", "update_every"),
    [
        ("pipedream", 3, "vertical sync", 1), ("pipedream", 3, "2bw", 4), ("pipedream", 2, "stash", 2),
        ("zero_bubble_h1", 3, "stash", 1), ("interleaved", 2, "vertical sync", 1),
    ],
)  # fmt: skip
def test_any_program_with_one_rank_per_stage(name, num_ranks, rule, update_every):
    program = build(name, num_ranks, 12)
    batch = make_batch(12)
    stages = partly_frozen(program.num_stages)

    def fn(rank, world_size):
        mine = {action.stage: stages[action.stage] for action in program.actions(rank)}
        sgd = lambda parameters: torch.optim.SGD(parameters, 0.5, momentum=0.9)  # noqa: E731
        runtime = AsynchronousRuntime(program, mine, nn.functional.mse_loss, sgd, rule, update_every)
        runtime.run(*batch)
        weights = {stage: [p.detach() for p in module.parameters()] for stage, module in mine.items()}
        return weights, runtime.versions_kept, runtime.weight_bytes

    out = lab.launch(fn, num_ranks)
    versions = choose_versions(program, rule, update_every)
    expected = delayed(program.num_stages, batch, versions, update_every, 0.5, 0.9)
    kept = versions_kept(program, versions, update_every)
    for weights, found, counted in out:
        for stage, ours in weights.items():
            close(ours, expected[stage])
            assert found[stage] == kept[stage]
            assert counted[stage] == kept[stage] * 8 * sum(weight.numel() for weight in ours)


def test_what_cannot_be_is_refused():
    for program, rule, update_every, message in [
        (pipedream(2, 4), "stash", 3, "a run of 4 microbatches has no whole number of updates after every 3"),
        (
            pipedream(2, 4),
            "fresh",
            1,
            "there is no rule 'fresh' for weight versions; use one of stash, naive",
        ),
        (dualpipe(2, 4), "stash", 1, "stage 0 of DualPipe is on ranks 0 and 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            choose_versions(program, rule, update_every)
