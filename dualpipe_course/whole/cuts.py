"""Exercises of "One model on every cut": what a rank holds, the trainer, data by ranks.

Chapter: book/whole/cuts.  The trainer is judged beside a model of one process that knows no part (`own/plain_model`);
shares of data with the grid's coordinates.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

from dualpipe_course.comparison import Found, Limit, Numbers, Off, in_words
from dualpipe_course.declared import Repair
from dualpipe_course.meter import Meter
from dualpipe_course.own.part import Alone, OnRanks, Part
from dualpipe_course.plain import plain
from dualpipe_course.trial import call_each, ended
from dualpipe_course.wrong import Wrong
from dualpipe_lab.pp import schedules
from dualpipe_lab.topology import Topology

if TYPE_CHECKING:
    from torch import Tensor

    from dualpipe_ours.plain_model import Trained

Axes: TypeAlias = list[tuple[str, int]]


LAYERS, TOKENS, EXPERTS_OF_ALL = 4, 4, 8  # of the model of one process
CUT = {"up": 0, "down": 1}  # the dimension along which a group cuts the MLP
EXPERTS = ("gates", "ups", "downs")
ROWS = (  # in words, the rows, the positions of each stage
    ("one stage", ["0F0 0B0"], {0: [0]}),
    ("a line of 2", ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"], {0: [0], 1: [1]}),
    ("I and W", ["0F0 0I0 0W0", "1F0 1I0 1W0"], {0: [0], 1: [1]}),
    ("position 1 runs nothing", ["0F0 0B0", "", "1F0 1B0"], {0: [0], 1: [2]}),
    ("pairs alone", ["(3F0;12B1)OVERLAP_F_B", "(12F1;3B0)OVERLAP_F_B"], {3: [0, 1], 12: [0, 1]}),
    ("DualPipe on 4", schedules.dualpipe(4, 8).rows(), {0: [0, 3], 1: [1, 2], 2: [1, 2], 3: [0, 3]}),
    ("DualPipeV on 2", schedules.dualpipev(2, 4).rows(), {0: [0], 1: [1], 2: [1], 3: [0]}),
)


def _look_at_holders(name: str, rows: list[str], expected: dict[int, list[int]]) -> str:
    from mine.held import holders

    value = holders(list(rows))
    if not isinstance(value, dict):
        return f"holders returns a dict from stage to positions, got {type(value).__name__}"
    found = {stage: list(positions) for stage, positions in value.items()}
    if found == expected:
        return ""
    stage = next((stage for stage in expected if found.get(stage) != expected[stage]), None)
    if stage is None:
        return f"there is no stage {next(stage for stage in found if stage not in expected)!r} in the rows"
    return f"stage {stage} is held by {found.get(stage)}, expected {expected[stage]}; a pair names two stages"


def _layers() -> list[dict[str, Any]]:
    """A first layer, a last one, and one without experts that is both."""
    from dualpipe_ours.plain_model import make_layers

    return [*make_layers(2), *make_layers(1, with_experts=False, seed=1)]


def _named(layers: Sequence[Mapping[str, Any]]) -> "dict[str, Tensor]":
    """All tensors of layers, by layer and name; of experts one by one."""
    found: dict[str, Tensor] = {}
    for number, w in enumerate(layers):
        for name, value in w.items():
            if isinstance(value, (list, tuple)):
                found |= {f"layer {number} {name}[{place}]": one for place, one in enumerate(value)}
            else:
                found[f"layer {number} {name}"] = value
    return found


def _held(rank: int, world_size: int, positions: list[int], size: int) -> Found:
    """What a rank has of three layers, and for each weight a sum in which rank r counts 10^r."""
    import torch
    from mine.held import part_of, sums
    from mine.ring import all_reduce

    position, member = divmod(rank, size)
    if position not in positions:
        return Found({})
    layers = _layers()
    ws = [part_of(w, member, size) for w in layers]
    found, whole = _named(ws), _named(layers)
    for name, value in found.items():
        if said := _leaf_fault(name, value, list(whole.values())):
            return Found({}, refused=said)
    names = {id(leaf): name for name, leaf in found.items()}
    values = {name: Numbers.of(value) for name, value in found.items()}
    for leaves, ranks in [*sums([], positions, member, size), *sums(ws, positions, member, size)]:
        if rank not in ranks:
            return Found({}, refused=f"sums has leaves with ranks {list(ranks)}, and this rank is none of them")
        for leaf in leaves:
            if (name := names.pop(id(leaf), "")) == "":
                return Found({}, refused="sums has a tensor that is no leaf of ws, or has it twice")
            if name.endswith("bias"):
                return Found({}, refused=f"{name} is in a sum: the bias of a router has no gradient")
            number = list(found).index(name)
            digits = torch.tensor([10.0**rank, number], dtype=torch.float64)
            all_reduce(digits, list(ranks))
            values[f"{name}: sum"] = Numbers.of(digits)
    return Found(values)


def _leaf_fault(name: str, value: "Tensor", whole: "Sequence[Tensor]") -> str:
    if name.endswith("bias"):
        return f"{name} wants a gradient; it is never changed" if value.requires_grad else ""
    if not value.is_leaf or not value.requires_grad:
        return f"{name} is no leaf that wants a gradient; detach, clone, requires_grad_"
    memory = value.untyped_storage()
    if memory.nbytes() > value.nbytes or memory.data_ptr() in [one.untyped_storage().data_ptr() for one in whole]:
        return f"{name} is a view of the full weight, which stays in memory with it; clone"
    return ""


def _held_of(rank: int, world_size: int, positions: list[int], size: int) -> "dict[str, Tensor | None]":
    """The same by slices of the model of one process."""
    import torch

    position, member = divmod(rank, size)
    parts = [_part(w, member, size) for w in _layers()]
    found: dict[str, Tensor | None] = dict(_named(parts))
    everybody = [one * size + other for one in positions for other in range(size)]
    mirrors = [one * size + member for one in positions]
    for number, name in enumerate(list(found)):
        if not name.endswith("bias"):
            is_cut = name.split()[2].partition("[")[0] in (*CUT, *EXPERTS)
            ranks = mirrors if is_cut else everybody
            digits = [float(sum(10**one for one in ranks)), float(number * len(ranks))]
            found[f"{name}: sum"] = torch.tensor(digits, dtype=torch.float64)
    return found if position in positions else dict.fromkeys(found)


def _part(w: Mapping[str, Any], member: int, size: int) -> dict[str, Any]:
    """What a member of a group has of a layer."""
    part: dict[str, Any] = {}
    for name, value in w.items():
        if name in EXPERTS:
            part[name] = value[member * len(value) // size : (member + 1) * len(value) // size]
        else:
            part[name] = value.chunk(size, CUT[name])[member] if name in CUT else value
    return part


def _why_not_held(off: Off) -> str:
    name = off.name.split()[2].removesuffix(":").partition("[")[0]
    is_cut = name in (*CUT, *EXPERTS)
    if not off.name.endswith(": sum"):
        how = "experts are held in blocks, up by rows, down by columns, all else whole" if not off.slip else off.slip
        return f"{in_words(off)}; {how}"
    if off.found is None:
        return f"{off.name.removesuffix(': sum')} is in no sum"
    found, expected = ([r for r in range(9) if int(value.flat[0]) // 10**r % 10] for value in (off.found, off.expected))
    if found == expected:
        return (
            f"{off.name.removesuffix(': sum')}: the ranks add another weight to it; leaves need one order on all ranks"
        )
    rule = (
        "each member of the group has another part of it, only copies of the stage have the same"
        if is_cut
        else "all members of all copies hold it and use it for other tokens"
    )
    return f"{off.name} is over ranks {found}, expected {expected}: {rule}"


def _program(order: str, positions: int, num_microbatches: int) -> tuple[list[str], Callable[[int, int], int], int]:
    """Rows, place and the number of stages of one of the library's schedules."""
    program = schedules.build(order, positions, num_microbatches)
    return list(program.rows()), program.rank_of, program.num_stages


def _batches(num_microbatches: int, num_steps: int, size: int) -> "list[tuple[Tensor, Tensor]]":
    """The last microbatch has no targets, in the second step the first member of a group has none at all."""
    from dualpipe_ours.plain_model import make_batch

    batches = [make_batch(num_microbatches, TOKENS, step) for step in range(num_steps)]
    for _, targets in batches[1:2] if size > 1 else []:
        targets[:, : TOKENS // size] = -100
    return batches


def _train(rank: int, world_size: int, order: str, size: int, num_microbatches: int, num_steps: int) -> Found:
    """The losses, the gradients of the first step put together over the world, and the weights that are here."""
    import torch
    from mine.train import Trainer

    from dualpipe_lab import comm
    from dualpipe_ours.plain_model import HEADS, LR, ROUTE, leaves, make_layers

    rows, place, num_stages = _program(order, world_size // size, num_microbatches)
    trainer = Trainer(make_layers(LAYERS), rows, place, num_stages, size, HEADS, ROUTE, LR)
    meter, sent, losses, values = Meter(), 0, [], {}
    member = rank % size
    for step, (ids, targets) in enumerate(_batches(num_microbatches, num_steps, size)):
        meter.lap()
        losses.append(float(trainer.step(ids, targets)))
        sent += meter.lap().bytes
        if step:
            continue
        own = {}
        for stage, ws in trainer.held.items():
            for (number, name, expert), leaf in leaves(ws).items():
                own[stage * LAYERS // num_stages + number, name, expert] = leaf.grad
        weights = leaves(make_layers(LAYERS))
        summed = [torch.zeros_like(weight) for weight in weights.values()]
        for ((layer, name, expert), _), whole in zip(weights.items(), summed, strict=True):
            first = 0 if expert is None else member * EXPERTS_OF_ALL // size
            grad = own.get((layer, name, None if expert is None else expert - first))
            here = whole.chunk(size, CUT[name])[member] if name in CUT else whole
            if grad is not None and grad.shape != here.shape:
                return Found({}, refused=f"the gradient of {_called(layer, name, expert)} is {list(grad.shape)}")
            with torch.no_grad():
                here.copy_(torch.zeros(()) if grad is None else grad)
        flat = torch.cat([whole.flatten() for whole in summed])
        comm.all_reduce(flat)
        for which, whole in zip(weights, flat.split([whole.numel() for whole in summed]), strict=True):
            values[f"gradient of {_called(*which)}"] = Numbers.of(whole.view_as(weights[which]))
    for stage, ws in trainer.held.items():
        for (number, name, expert), leaf in leaves(ws).items():
            expert = None if expert is None else expert + member * EXPERTS_OF_ALL // size
            values[_called(stage * LAYERS // num_stages + number, name, expert)] = Numbers.of(leaf)
    values |= {f"loss of step {step}": Numbers.of(torch.tensor([loss])) for step, loss in enumerate(losses, start=1)}
    return Found(values, costs={"sent": sent / num_steps})


def _trained(
    rank: int, world_size: int, order: str, size: int, num_microbatches: int, num_steps: int
) -> "dict[str, Tensor | None]":
    """The same by one process that runs all tokens through all layers."""
    import torch

    losses, first, weights = _on_one_process(size, num_microbatches, num_steps)
    _, place, num_stages = _program(order, world_size // size, num_microbatches)
    position, member = divmod(rank, size)
    found: dict[str, Tensor | None] = {"loss of step 1": torch.tensor([losses[0]])}
    found |= {f"gradient of {_called(*which)}": grad for which, grad in first.items()}
    for (layer, name, expert), weight in weights.items():
        stage = layer * num_stages // LAYERS
        is_here = position in [place(stage, i) for i in range(num_microbatches)]
        if expert is not None:
            is_here &= expert * size // EXPERTS_OF_ALL == member
        part = weight.chunk(size, CUT[name])[member] if name in CUT else weight
        found[_called(layer, name, expert)] = part if is_here else None
    return found | {f"loss of step {step}": torch.tensor([loss]) for step, loss in enumerate(losses, start=1)}


@cache
def _on_one_process(size: int, num_microbatches: int, num_steps: int) -> "Trained":
    """One training for all ranks of a case."""
    from dualpipe_ours.plain_model import make_layers, train

    return train(make_layers(LAYERS), _batches(num_microbatches, num_steps, size))


def _why_not_trained(off: Off) -> str:
    said = in_words(off)
    if off.name.startswith("loss"):
        if "times that of" in said:
            return f"{said}. Every rank has all targets, so they are counted once, and shares add up over the world"
        if off.rank or any(value != off.found for value in off.by_rank) or len(off.by_rank) == 1:
            return said
        return f"{said}. Members of a group take consecutive tokens, the first member the first ones"
    if off.found is None:
        return f"{said}: .held has for each stage of this rank the parts of its layers"
    name = off.name.split()[-1].partition("[")[0]
    if off.name.startswith("gradient"):
        return f"{said}. It is the sum of .grad, after the first step, over the ranks that hold {name}"
    how = "copies of the stage alone" if name in (*CUT, *EXPERTS) else "all members of all copies of the stage"
    return (
        f"{said}. The raw gradients of the first step were right: is {name} summed over {how}, updated once, and .grad "
        "cleared at the start of a step?"
    )


def _sent(world_size: int, order: str, size: int, num_microbatches: int, num_steps: int) -> list[Limit]:
    """Bytes of a step over all ranks: at least those between stages, at most a quarter more than all that is needed."""
    from dualpipe_ours.plain_model import ROUTE, WIDTH, leaves, make_layers

    _, place, num_stages = _program(order, world_size // size, num_microbatches)
    tokens = TOKENS * WIDTH * 8  # bytes of a microbatch between two stages
    crossed = [place(s, i) != place(s + 1, i) for s in range(num_stages - 1) for i in range(num_microbatches)]
    between = 2 * sum(crossed) * tokens
    # A layer's: keys, values and their gradients round the ring; gathers and scatters of the MLP; rows of experts.
    of_a_layer = (6 * size + 5 * (size - 1) + 4 * ROUTE[0]) * tokens if size > 1 else 0
    gradients = 0
    for (layer, name, _), weight in leaves(make_layers(LAYERS)).items():
        copies = len({place(layer * num_stages // LAYERS, i) for i in range(num_microbatches)})
        holders = copies if name in (*CUT, *EXPERTS) else copies * size
        gradients += 2 * (holders - 1) * weight.numel() * 8
    most = 1.25 * (2 * between + LAYERS * num_microbatches * of_a_layer + gradients)
    words = (
        "{found:,.0f} bytes are sent in a step, between {least:,} and {most:,.0f} is what it takes: activations "
        "from stage to stage, tokens round the group, and each gradient once per step, not once per microbatch"
    ).replace("{least:,}", f"{between:,}")
    return [Limit("sent", most, words, least=between)]


def _called(layer: int, name: str, expert: int | None) -> str:
    return f"layer {layer} {name}" if expert is None else f"layer {layer} {name}[{expert}]"


def _share_fault(case: tuple[int, Axes, int, int, int], is_fine: bool, value: Any) -> str | None:
    rank, axes, batch, num_microbatches, length = case
    words = f"{' x '.join(f'{name} {size}' for name, size in axes)}, rank {rank}"
    if not is_fine:
        return ended(words, value)
    grid, sizes = Topology(axes), dict(axes)
    here = grid.at(rank).coordinates
    dp, cp = sizes.get("dp", 1), sizes.get("cp", 1)
    each, span = batch // dp // num_microbatches, length // cp
    first, start = here.get("dp", 0) * batch // dp, here.get("cp", 0) * span
    sequences = [list(range(first + i * each, first + (i + 1) * each)) for i in range(num_microbatches)]
    positions = list(range(start, start + span))
    if not isinstance(value, list) or len(value) != 2:
        return f"{words}: expected the sequences of each microbatch, and the positions"
    if value[0] != sequences:
        mates = [
            other for other in range(grid.world_size) if grid.at(other).coordinates.get("dp", 0) == here.get("dp", 0)
        ]
        return (
            f"{words}: it reads sequences {value[0]}, expected {sequences}: ranks {', '.join(map(str, mates))} are one "
            f"data rank"
        )
    if value[1] != positions:
        return f"{words}: it reads positions {value[1]}, expected {positions}: it is cp {here.get('cp', 0)} of {cp}"
    return None


def _judge_share_of(fn: Callable[..., Any]) -> str:
    grids: list[Axes] = [
        [("dp", 2)],
        [("dp", 4), ("tp", 2)],
        [("pp", 2), ("dp", 2)],
        [("pp", 2), ("cp", 2), ("tp", 2)],
        [("tp", 2), ("cp", 3), ("dp", 2)],
        [("pp", 3), ("dp", 2), ("cp", 2), ("tp", 2)],
    ]
    for axes in grids:
        world = prod(size for _, size in axes)
        cases = [(rank, axes, 8, 2, 12) for rank in range(world)]
        for case, (is_fine, value) in zip(cases, call_each(fn, cases), strict=True):
            if (fault := _share_fault(case, is_fine, plain(value))) is not None:
                raise Wrong(fault)
    return f"{len(grids)} grids: ranks of one pipeline read the same sequences"


held = Part(
    "cuts-5",
    "held",
    "Who holds what",
    "Write holders, part_of and sums: what a rank holds of a layer, and with whom it sums which gradients.",
    names=("holders", "part_of", "sums"),
    trials=(
        Alone(_look_at_holders, ROWS, "{0}"),
        OnRanks(
            _held,
            ((1, [0], 1), (2, [0], 2), (2, [0, 1], 1), (3, [0, 2], 1), (4, [0], 4), (4, [0, 1], 2)),
            _held_of,
            "{0} rank(s), a stage on position(s) {1}, groups of {2}",
            why=_why_not_held,
            tolerance=0,
        ),
    ),
    right="7 tables of rows, and three layers on 1 to 4 ranks: every part, and for every weight who adds to it",
    minutes=60,
    points=4,
    hints=(
        "A stage is at a position if a word of its row names it, and actions(token) names both of a pair.",
        "Take the names one by one: lists of experts are sliced, member * here to (member + 1) * here; up and down are "
        "value.chunk(size, dim)[member], with dimension 0 for up and 1 for down; the rest is whole. "
        "x.detach().clone().requires_grad_() is a leaf of its own.",
        "rank = position * size + member. Cut weights are summed over [position * size + member for position in "
        "positions], all others but bias over every member of every position. Go through ws and its names in order.",
    ),
)

trainer = Part(
    "cuts-6",
    "train",
    "All together",
    "Write Trainer: layers on stages under any rows, equal to one process.",
    names=("Trainer",),
    trials=(
        OnRanks(
            _train,
            (
                (1, "1f1b", 1, 2, 2),
                (2, "1f1b", 1, 3, 1),
                (2, "gpipe", 2, 2, 2),
                (4, "dualpipe", 2, 4, 3),
                (4, "dualpipev", 2, 4, 2),
                (4, "1f1b", 2, 3, 2),
            ),
            _trained,
            "{1} on {0} rank(s), groups of {2}, {3} microbatches, {4} step(s)",
            _sent,
            _why_not_trained,
            tolerance=1e-10,
        ),
    ),
    right="1 to 4 ranks under 1F1B, GPipe, DualPipe and DualPipeV: losses, first gradients and weights of one process",
    minutes=90,
    points=5,
    hints=(
        "In __init__: position and member of this rank, its row with_messages, and for each stage that holders gives "
        "it the parts of its layers, a PairedStage of their steps, and a ShardedAdam for each entry of sums.",
        "In step: clear .grad; count the targets once, over this rank alone, because every rank has them all; cut ids "
        "and targets along dimension 1; execute; let each optimizer step; sum the shares of the loss over the world.",
        "The model's first step takes ids: Compute(lambda ids, carry: first.f(w['embed'][ids], carry)); its last one "
        "ends with linear(norm(x, w['norm3']), w['head']). peers is "
        "lambda stage, i: place(stage, i) * size + member.",
    ),
)

share_of = Repair(
    "cuts-4",
    "The same plan, another loss",
    "Repair `share(rank, axes, batch, num_microbatches, length)`: what a rank reads.",
    judge=_judge_share_of,
    minutes=12,
    points=2,
    trail=True,
    hints=(
        "Write down the coordinates of ranks 0 to 3 of pp 2 x dp 2, and beside each what the function reads.",
        "A coordinate along an axis is rank // stride % size; the stride is the product of the sizes to its right.",
    ),
)
