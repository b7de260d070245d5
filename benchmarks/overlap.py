"""What overlap gives in wall time: pairs beside their two-stream simulation, whole pipelines, and a V3 model.

    python benchmarks/overlap.py [--layers 4] [--work-ms 20] [--rounds 7] [--unit-ms 10] [--pipelines 4 8]

  pairs       a forward and a backward microbatch of MoE layers on 2 ranks, communication 0.5, 1 and 1.5 times the work
              of one operation: measured, its ratio to the simulation, and the simulation beside the longer sum
  pipelines   1F1B, ZB-H1 and DualPipe, every pipeline rank two expert-parallel ranks, one layer per stage; F
              computes as long as it communicates.  A step lasts from the first rank's start to the last rank's end
  V3 model    DualPipe on 2 pipeline ranks of 2 ranks each: embedding, a dense layer, layers with a shared expert, head
Work is slept, all-to-alls take the time of an emulated link, messages between stages are not delayed; tensors, routing
and autograd are real and come on top.  Every round runs every contender once, every second round from the last to the
first; medians over the rounds, and the least and the most of the ratio to the simulation.
"""

import argparse
import os
from statistics import median
from typing import Any

import torch
from _paired import in_turns, spread
from torch import Tensor
from torch.nn.functional import mse_loss

import dualpipe_lab as lab
from dualpipe_lab import comm, models, schedules
from dualpipe_lab.ep import ExpertParallel
from dualpipe_lab.ep.overlap import (
    MicrobatchPass,
    Order,
    OverlappableStage,
    backward_alone,
    emulated,
    execute,
    forward_alone,
    input_grads_alone,
    lower_bound,
    one_f_one_b_basic,
    one_f_one_b_overlap,
    overlappable_stage,
    overlapped_forward_backward,
    simulate,
    ticks_of,
    weight_grads_alone,
)
from dualpipe_lab.ep.overlap import (
    closed_forms as forms,
)
from dualpipe_lab.pp import Program, run_pair_serially

MS, SIZES = emulated.MS, emulated.Sizes()
V3 = models.V3MoEConfig(hidden_size=16, num_layers=6, num_heads=2, num_kv_heads=1, ffn_size=32, expert_ffn_size=12)
V3_SIZES = emulated.Sizes(hidden=V3.hidden_size, experts=V3.num_experts, top_k=V3.num_experts_per_token)
CONTENDERS = {
    "1F1B": ("1f1b", run_pair_serially),
    "ZB-H1": ("zero_bubble_h1", run_pair_serially),
    "DualPipe, serial pairs": ("dualpipe", run_pair_serially),
    "DualPipe, overlapped": ("dualpipe", overlapped_forward_backward),
}


def beside(measured: list[int], predicted: Any) -> str:
    """The median, what was predicted, and the ratio with its least and its most."""
    ratios = [float(one / predicted) for one in measured]
    return f"{median(measured) / MS:>9.1f}{float(predicted / MS):>10.1f}  {spread(ratios)}"


def time_pairs(rank: int, world_size: int, orders: list[Order], ticks: Any, rounds: int) -> list[list[int]]:
    """Nanoseconds of every order, by round; the first round warms up."""
    num_layers = len(orders[0].comm) // 4
    layers = emulated.make_layers(emulated.make_weights(num_layers), even=SIZES)
    x = torch.randn(SIZES.tokens, SIZES.hidden, dtype=torch.float64)
    found: list[list[int]] = []
    for number in range(rounds + 1):
        found.append([0] * len(orders))
        for place, order in in_turns(enumerate(orders), number):
            old = MicrobatchPass(layers, x)
            execute(forward_alone(num_layers), forward=old)
            old.dy = x
            comm.barrier()
            found[-1][place] = int(execute(order, MicrobatchPass(layers, x), old, ticks).makespan)
    return found[1:]


def pairs(num_layers: int, work_ms: float, rounds: int) -> None:
    """Print one row per ratio and order."""
    print(f"\n{num_layers} layers on 2 ranks, {work_ms:g} ms of work per operation: ms per pair")
    print(f"{'comm/work':>9}  {'order':<13}{'measured':>9}{'simulated':>10}  {'ratio':<20}{'longer sum':>11}")
    for share in (0.5, 1.0, 1.5):
        comm_ms = share * work_ms
        ticks = ticks_of(round(work_ms * MS), round(comm_ms * MS))
        orders = [one_f_one_b_basic(num_layers), one_f_one_b_overlap(num_layers)]
        out = lab.launch(time_pairs, 2, orders, ticks, rounds, link=SIZES.link(comm_ms), timeout=300)
        for place, order in enumerate(orders):
            measured = [max(rank[i][place] for rank in out) for i in range(rounds)]
            cells = beside(measured, simulate(order, ticks).makespan)
            print(f"{share:>9}  {order.name:<13}{cells}{float(lower_bound(order, ticks) / MS):>11.1f}", flush=True)


def time_steps(
    rank: int, world_size: int, programs: list[tuple[Program, Any]], ticks: Any, batch: list[Tensor], rounds: int
) -> list[list[tuple[int, int]]]:
    """Start and end of a step of every contender, by round; the first round warms up."""
    mesh = lab.Mesh(lab.Topology([("pp", programs[0][0].num_ranks), ("ep", 2)]))
    ep, weights = ExpertParallel(mesh.group("ep")), emulated.make_weights(programs[0][0].num_stages)
    steps = []
    for program, hook in programs:
        mine = program.stages_of(mesh.rank("pp"))
        stages = {s: OverlappableStage(s, emulated.make_layers(weights[s : s + 1], ep, SIZES), ticks) for s in mine}
        steps.append(lab.PipelineRuntime(program, stages, mse_loss, batch[0], mesh.group("pp"), overlapped=hook))
    found: list[list[tuple[int, int]]] = []
    for number in range(rounds + 1):
        found.append([(0, 0)] * len(steps))
        for place, runtime in in_turns(enumerate(steps), number):
            comm.barrier()
            started = lab.now()
            runtime.step(batch, batch)
            found[-1][place] = started, lab.now()
    return found[1:]


def pipelines(num_ranks: int, rounds: int, unit_ms: float) -> None:
    """Print one row per schedule; a unit is the work of F, of I and of W."""
    number, work, comm_ms = 20 if num_ranks == 8 else 2 * num_ranks, unit_ms / 2, unit_ms / 2
    programs = [(schedules.build(name, num_ranks, number), hook) for name, hook in CONTENDERS.values()]
    ticks = ticks_of(round(work * MS), round(comm_ms * MS))
    batch = [torch.randn(SIZES.tokens, SIZES.hidden, dtype=torch.float64) for _ in range(number)]
    link = lab.NodeLink(SIZES.link(comm_ms), lab.Link(gbps=1e6), ranks_per_node=2)
    out = lab.launch(time_steps, 2 * num_ranks, programs, ticks, batch, rounds, link=link, timeout=900)
    print(f"\n{num_ranks} pipeline ranks of 2 ranks each, {number} microbatches, unit {unit_ms:g} ms: ms per step")
    print(f"{'':<24}{'measured':>9}{'simulated':>10}  {'ratio':<20}{'units':>6}")
    for place, (title, (program, hook)) in enumerate(zip(CONTENDERS, programs, strict=True)):
        spans = [[rank[i][place] for rank in out] for i in range(rounds)]
        measured = [max(end for _, end in span) - min(start for start, _ in span) for span in spans]
        predicted = lab.simulate(program, pipeline_cost(work, comm_ms, hook is overlapped_forward_backward)).makespan
        print(f"{title:<24}{beside(measured, predicted)}{float(predicted / MS) / unit_ms:>8.1f}", flush=True)


def pipeline_cost(work: float, comm_ms: float, is_overlapped: bool) -> lab.Cost:
    """What F, I, W, B and a pair of one layer take, in nanoseconds."""
    size = 1, round(work * MS), round(comm_ms * MS)
    forward, backward = forms.forward_makespan(*size), forms.backward_makespan(*size)
    pair = forms.overlap_makespan(*size) if is_overlapped else forward + backward
    return lab.Cost(F=forward, I=forward, W=2 * size[1], B=backward, overlap=pair)


def time_models(rank: int, world_size: int, ticks: Any, batch: list[Tensor], rounds: int) -> list[list[Any]]:
    """Start and end of a step of a V3 model with serial and with overlapped pairs; the first round warms up."""
    program, sizes = schedules.build("dualpipe", 2, len(batch)), V3_SIZES
    mesh = lab.Mesh(lab.Topology([("pp", 2), ("ep", 2)]))
    fixed, steps = emulated.even_choices(sizes), []
    for hook in (run_pair_serially, overlapped_forward_backward):
        model = models.build_stages(V3, mesh, program, layers=[3, 3])
        stages = {s: overlappable_stage(stage, s, ticks, fixed=fixed) for s, stage in model.stages.items()}
        like = model.boundary(1, sizes.tokens)
        steps.append(lab.PipelineRuntime(program, stages, model.loss_fn(), like, mesh.group("pp"), overlapped=hook))
    found: list[list[Any]] = []
    for number in range(rounds + 1):
        found.append([(0, 0)] * len(steps))
        for place, runtime in in_turns(enumerate(steps), number):
            comm.barrier()
            started = lab.now()
            runtime.step(batch, batch)
            found[-1][place] = started, lab.now()
    return found[1:]


def v3_model(rounds: int, unit_ms: float) -> None:
    """Print one row for serial and one for overlapped pairs."""
    ticks = ticks_of(round(unit_ms / 2 * MS), S_F=round(unit_ms / 4 * MS), P_F=round(unit_ms / 4 * MS))
    num_microbatches, letters = 8, (["P", "P", *["ASDMC"] * 2], [*["ASDMC"] * 3, "P"])
    batch = [torch.arange(V3_SIZES.tokens)[None] % V3.vocabulary_size] * num_microbatches
    link = lab.NodeLink(V3_SIZES.link(unit_ms), lab.Link(gbps=1e6), ranks_per_node=2)  # float32: half of the bytes
    out = lab.launch(time_models, 4, ticks, batch, rounds, link=link, timeout=900)
    print(f"\nV3 model of 6 layers, 2 pipeline ranks of 2 ranks each, {num_microbatches} microbatches: ms per step")
    print(f"{'':<24}{'measured':>9}{'simulated':>10}  {'ratio':<20}")
    kinds = {"F": forward_alone, "B": backward_alone, "I": input_grads_alone, "W": weight_grads_alone}
    ticks = ticks | dict.fromkeys(("D_F", "C_F", "C_B", "D_B"), round(unit_ms / 2 * MS))
    alone = {kind: [simulate(build(each), ticks).makespan for each in letters] for kind, build in kinds.items()}

    def pair(step: Any) -> Any:
        up, down = step
        order = one_f_one_b_overlap(letters[up.stage], backward_layers=letters[down.stage])
        return simulate(order, ticks).makespan

    for place, (title, overlap) in enumerate({"serial pairs": None, "overlapped": pair}.items()):
        spans = [[rank[i][place] for rank in out] for i in range(rounds)]
        measured = [max(end for _, end in span) - min(start for start, _ in span) for span in spans]
        program = schedules.build("dualpipe", 2, num_microbatches)
        predicted = lab.simulate(program, lab.Cost(**alone, overlap=overlap)).makespan
        print(f"{title:<24}{beside(measured, predicted)}", flush=True)


def main() -> None:
    """Run all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--work-ms", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--unit-ms", type=float, default=10)
    parser.add_argument("--pipelines", type=int, nargs="*", default=[4, 8])
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    pairs(arguments.layers, arguments.work_ms, arguments.rounds)
    for num_ranks in arguments.pipelines:
        pipelines(num_ranks, arguments.rounds, arguments.unit_ms)
    v3_model(arguments.rounds, arguments.unit_ms)


if __name__ == "__main__":
    main()
