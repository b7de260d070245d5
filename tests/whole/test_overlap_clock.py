"""V3 stages with overlapped experts on the virtual clock: the simulated time, to the nanosecond."""

from dataclasses import replace

import torch
from stage_runs import LENGTH, ROWS, V3, batch, build

import dualpipe_lab as lab
from dualpipe_lab import comm, schedules
from dualpipe_lab.ep.overlap import (
    backward_alone,
    emulated,
    forward_alone,
    input_grads_alone,
    one_f_one_b_overlap,
    overlappable_stage,
    overlapped_forward_backward,
    simulate,
    ticks_of,
    weight_grads_alone,
)
from dualpipe_lab.ep.overlap.order import without_weight_grads

MS = emulated.MS
CONFIG = replace(V3, num_layers=6)
SIZES = emulated.Sizes(
    tokens=ROWS * LENGTH, hidden=CONFIG.hidden_size, experts=CONFIG.num_experts, top_k=CONFIG.num_experts_per_token
)
COMM_MS = 6
TICKS = ticks_of(4 * MS, COMM_MS * MS, A_F=9 * MS, S_F=3 * MS, S_B=2 * MS, S_W=5 * MS, P_F=7 * MS, P_B=MS, M_W=2 * MS)
UP, DOWN = ["P", "P", "ASDMC", "ASDMC"], ["ASDMC", "ASDMC", "ASDMC", "P"]


def test_dualpipe_with_unequal_stages_takes_the_simulated_time():
    layers, number = [2, 4], 4
    letters = [UP[:3], [*DOWN[:1], *DOWN]]

    def fn(rank, world_size, program, hook_is_overlapped):
        mesh = lab.Mesh(lab.Topology([("pp", 2), ("ep", 2)]))
        model = build(CONFIG, mesh, program, layers=layers)
        fixed = emulated.even_choices(SIZES)
        stages = {s: overlappable_stage(m, s, TICKS, fixed=fixed) for s, m in model.stages.items()}
        assert all(stage.letters == letters[s] for s, stage in stages.items())
        ids, targets = batch(CONFIG.vocabulary_size, number, 2)
        like = torch.empty(ROWS, LENGTH, CONFIG.hidden_size, dtype=torch.float64)
        options = {"overlapped": overlapped_forward_backward} if hook_is_overlapped else {}
        runtime = lab.PipelineRuntime(program, stages, model.loss_fn(), like, mesh.group("pp"), **options)
        comm.barrier()
        mine = mesh.rank("ep")
        runtime.step(list(ids[mine]), list(targets[mine]), [1.0] * number)

    def time(order):
        return simulate(order, TICKS).makespan

    program = schedules.build("dualpipe", 2, number)

    def pair(overlap):
        up, down = overlap
        order = one_f_one_b_overlap(letters[up.stage], 2, 1, backward_layers=letters[down.stage])
        return time(order if down.kind == "B" else without_weight_grads(order))

    builders = {"F": forward_alone, "B": backward_alone, "I": input_grads_alone, "W": weight_grads_alone}
    alone = {kind: [time(build(each)) for each in letters] for kind, build in builders.items()}
    link = lab.NodeLink(SIZES.link(COMM_MS), lab.Link(gbps=1e9), ranks_per_node=2)
    for hook_is_overlapped, overlap in ((True, pair), (False, None)):
        out = lab.launch(fn, 4, program, hook_is_overlapped, clock="virtual", link=link, timeout=120)
        predicted = lab.simulate(program, lab.Cost(**alone, overlap=overlap), unit="ns").makespan
        assert out.timeline.steps()[0].makespan == predicted
