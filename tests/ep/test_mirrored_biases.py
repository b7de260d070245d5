"""Selection biases under DualPipe: both copies of a stage count half of the microbatches, and move as one process."""

import torch
from runs import assert_refused, draw, launch
from torch import nn

import dualpipe_lab as lab
from dualpipe_lab.ep.deepseek_moe import DeepSeekRouter, update_biases
from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.runtime import PipelineRuntime

HIDDEN, E, K, M, DP, STEPS, SPEED = 5, 6, 2, 4, 2, 2, 0.1
PROGRAMS = {name: schedules.build(name, 2, M) for name in ("dualpipe", "dualpipev")}


class Routed(nn.Module):
    """A router whose weights scale a column each; stage 0 has two routers, stage 1 one, and stages from 2 on none."""

    def __init__(self, stage):
        super().__init__()
        number = max(0, 2 - stage)
        self.routers = nn.ModuleList(DeepSeekRouter(HIDDEN, E + stage, K, dtype=torch.float64) for _ in range(number))
        for index, router in enumerate(self.routers):
            router.weight.data = draw(10 * stage + index, E + stage, HIDDEN)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x):
        for router in self.routers:
            x = torch.tanh(x + router(x).weights.sum(-1, keepdim=True) + draw(7, HIDDEN))
        return x * self.scale


def batch(step):
    return draw(100 + step, DP, M, 7, HIDDEN)


def loss_fn(output, target):
    return (output * target).sum()


def one_process(num_stages):
    def fn(rank, world_size):
        stages, found = [Routed(stage) for stage in range(num_stages)], []
        for step in range(STEPS):
            for x in batch(step).flatten(0, 1):
                loss_fn(nn.Sequential(*stages)(x), x).backward()
            loads = update_biases(nn.ModuleList(stages), SPEED)
            found.append((loads, [router.bias.clone() for stage in stages for router in stage.routers]))
        return found

    return launch(fn, 1)[0]


def test_copies_of_a_router_keep_the_biases_of_one_process():
    """pp 2 x dp 2; each copy counts for itself, its loads are added once; all schedules take one call."""

    def fn(rank, world_size):
        mesh, results = lab.Mesh(lab.Topology([("pp", 2), ("dp", DP)])), {}
        for name, program in PROGRAMS.items():
            mine = {action.stage: Routed(action.stage) for action in program.actions(mesh.rank("pp"))}
            runtime = PipelineRuntime(program, mine, loss_fn, group=mesh.group("pp"))
            found = []
            for step in range(STEPS):
                xs = list(batch(step)[mesh.rank("dp")])
                runtime.step(xs, xs, [1.0] * M)
                counted = {stage: [int(r.load.sum()) for r in mine[stage].routers] for stage in mine}
                loads = update_biases(mine, SPEED, mesh.group("dp"), program, mesh.group("pp"))
                biases = {stage: [r.bias.clone() for r in mine[stage].routers] for stage in sorted(mine)}
                found.append((loads, biases, counted))
            results[name] = found
        return results

    references = {number: one_process(number) for number in {p.num_stages for p in PROGRAMS.values()}}
    moved = torch.stack([biases[0] for _, biases in references[2]])
    assert len(moved.unique(dim=0)) == STEPS  # the biases move in every step
    for results in launch(fn, 4, timeout=400):
        for name, found in results.items():
            where = {0: slice(0, 2), 1: slice(2, 3)}
            is_mirrored = name == "dualpipe"
            for (loads, biases, counted), (all_loads, all_biases) in zip(
                found, references[PROGRAMS[name].num_stages], strict=True
            ):
                expected = [load for stage in biases if stage in where for load in all_loads[where[stage]]]
                assert [load.tolist() for load in loads] == [load.tolist() for load in expected], name
                for stage, own in biases.items():
                    theirs = all_biases[where[stage]] if stage in where else []
                    assert all(torch.equal(a, b) for a, b in zip(own, theirs, strict=True)), (name, stage)
                    assert set(counted[stage]) <= {7 * K * (M // 2 if is_mirrored else M)}, name


def test_stages_that_are_not_the_programs_are_refused():
    one, two = {1: Routed(1)}, nn.ModuleList([Routed(0), Routed(1)])
    said = r"places stages \[0, 1\] on rank [01], got {}; give {{stage: module}}"
    cases = [(two, "a ModuleList"), (one, r"stages \[1\]")]
    assert_refused(
        2,
        [
            (lambda model=model: update_biases(model, SPEED, None, PROGRAMS["dualpipe"]), said.format(given))
            for model, given in cases
        ],
    )
