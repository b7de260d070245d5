"""Exercises of "Who sums what with whom": groups to predict, the sums to write, a plan within two budgets, a norm.

Chapter: book/whole/sums.  The sums and the norm are compared on real ranks with closed values.
The puzzle counts, in bytes and without padding, what a rank holds of weights, gradients and Adam's two moments in fp32:
  an element     4 + 4 + 8; ZeRO-1 shards the 8 over the group of its sum, ZeRO-2 the last two terms, ZeRO-3 all
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

from dualpipe_course.comparison import Found, Limit, Numbers, compare_on_ranks, norm_in_words
from dualpipe_course.declared import Implement, Predict, Puzzle, Repair
from dualpipe_course.whole.planned import plan_of
from dualpipe_course.wrong import Wrong
from dualpipe_lab.models import V3MoEConfig
from dualpipe_lab.plan import Plan
from dualpipe_lab.plan.gradient_traffic import parts_of
from dualpipe_lab.topology import Topology

if TYPE_CHECKING:
    from torch import Tensor

NAMES = ("ranks of the attention's sum", "ranks of an expert's sum", "copies of a router", "groups that sum experts")
_SLIPS: tuple[dict[int, str], ...] = (
    {
        24: "mirrors add before, and along tp no rank adds: the other rank of tp has another part of the matrix",
        3: "ranks along ep have other sentences too",
        4: "ranks along dp have other sentences too",
        48: "these are all ranks; only those with the same shard and other sentences add",
    },
    {
        12: "ranks along ep hold other experts; added, they would mix gradients of different weights",
        6: "ranks along tp hold the same experts and see the same tokens",
        1: "ranks along dp hold the same experts and have other sentences",
    },
    {
        12: "these are the ranks that sum it; ranks along tp, and mirrors, hold it too",
        24: "two axes beside dp and ep hold it too: tp, and under DualPipe both ranks of pp",
    },
    {4: "these are the groups of the router's sum", 8: "ranks along tp and both ranks of pp have groups of their own"},
)
CONFIG = V3MoEConfig(
    hidden_size=64, num_layers=4, num_heads=4, num_kv_heads=4, ffn_size=160, expert_ffn_size=64, num_experts=16
)
RANKS, SEQUENCES, LENGTH = 8, 16, 32
HELD, SENT = 3_300_000, 600_000  # bytes: of a rank; of its gradients' and weights' messages in a step
Axes: TypeAlias = list[tuple[str, int]]
_DATA = ("dp", "ep", "cp")


# what each of the parameters says: the axes along which it is cut, and whether ranks of tp know parts of its gradient
_SAID: tuple[tuple[tuple[str, ...], bool], ...] = (
    (("tp",), False),
    ((), False),
    (("ep",), False),
    ((), True),
    (("tp",), False),
    (("ep",), True),
)
_SHAPES = ((2, 3), (4,), (3, 2, 2), (4,), (5,), (2, 2))


def sum_axes(axes: Axes, cut: Sequence[str], is_partial: bool) -> tuple[str, ...]:
    """The axes of a gradient's sum, outermost first.

    >>> sum_axes([("dp", 2), ("ep", 2), ("tp", 2)], ("ep",), False)
    ('dp',)
    """
    return tuple(name for name, _ in axes if (name in _DATA and name not in cut) or (name == "tp" and is_partial))


def held_bytes(plan: Plan, rank: int) -> float:
    """What a rank holds of the puzzle's model: weights, gradients and moments, in bytes."""
    expert_copies = plan.dp * plan.cp // (plan.ep if plan.experts_in_data else 1)
    total = 0.0
    for part in parts_of(plan, CONFIG, rank):
        copies = expert_copies if "ep" in part.kind else plan.num_copies
        weight, gradient, moments = (copies if plan.zero >= stage else 1 for stage in (3, 2, 1))
        total += part.numel * (4 / weight + 4 / gradient + 8 / moments)
    return total


def _reduced(rank: int, world_size: int, fn: Callable[..., Any], axes: Axes) -> Found:
    import torch

    from dualpipe_lab import Mesh

    mesh = Mesh(Topology(axes))
    places = prod(size for name, size in axes if name in _DATA)
    here = mesh.coordinates
    parameters = []
    for number, shape in enumerate(_SHAPES):
        parameter = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64))
        summand = _summand(number, axes, here)
        parameter.grad = None if _is_idle(number, here) else summand
        parameters.append(parameter)
    fn(parameters, list(_SAID), mesh)
    values, expected, slips = {}, {}, {}
    for number, (parameter, (cut, is_partial)) in enumerate(zip(parameters, _SAID, strict=True)):
        words = f"cut along {' and '.join(cut)}" if cut else "cut along nothing"
        name = f"gradient {number} ({words}{', partial along tp' if is_partial else ''})"
        values[name] = Numbers.of(parameter.grad)
        own = sum_axes(axes, cut, is_partial)
        total = _total(number, axes, here, own)
        expected[name] = Numbers.of(total / places)
        slips[name] = _slips(number, axes, here, own, places)
    return Found(values, expected, slips)


def _slips(
    number: int, axes: Axes, here: Mapping[str, int], own: tuple[str, ...], places: int
) -> dict[str, Numbers | None]:
    """What typical mistakes make of a gradient."""
    total = _total(number, axes, here, own)
    names = [name for name, _ in axes]
    data = tuple(name for name in names if name in _DATA)
    members = prod(size for name, size in axes if name in own)
    made = {
        "this is the sum of the ranks' means and not their mean": total,
        "it is divided by the ranks that summed it; the loss of each rank is a mean over 1 / "
        f"{places} of the tokens, whichever ranks hold the weight": total / members,
        "each rank of tp knows a part of it, and these parts are not added": _total(
            number, axes, here, tuple(name for name in own if name != "tp")
        )
        / places,
        "no rank has summed it": _total(number, axes, here, ()) / places,
        "it is summed over all data ranks, also over those with other weights": _total(number, axes, here, data)
        / places,
        "it is summed along tp, where every rank has the full gradient already": _total(
            number, axes, here, tuple(name for name in names if name in own or name == "tp")
        )
        / places,
        "it is summed over the whole world, stages included": _total(number, axes, here, tuple(names)) / places,
    }
    return {words: Numbers.of(value) for words, value in made.items()}


def _is_idle(number: int, here: Mapping[str, int]) -> bool:
    """The experts of one place have got no token on the last data rank."""
    return number == 2 and here.get("dp", 0) == 1 and here.get("ep", 0) == 0


def _summand(number: int, axes: Axes, here: Mapping[str, int]) -> "Tensor":
    """The gradient on the rank at these coordinates; the same wherever nothing makes a difference."""
    import torch

    cut, is_partial = _SAID[number]
    matters = [n for n, _ in axes if n in (*cut, *_DATA, "pp") or (n == "tp" and is_partial)]
    seed = 1000 * number + sum(10**place * (1 + here[name]) for place, name in enumerate(matters))
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(_SHAPES[number], dtype=torch.float64, generator=generator)
    return torch.zeros_like(value) if _is_idle(number, here) else value


def _total(number: int, axes: Axes, here: Mapping[str, int], over: Sequence[str]) -> "Tensor":
    sizes = dict(axes)
    places = product(*(range(sizes[name]) for name in over))
    summands = [_summand(number, axes, {**here, **dict(zip(over, place, strict=True))}) for place in places]
    total = summands[0].clone()
    for other in summands[1:]:
        total += other
    return total


def _normed(rank: int, world_size: int, fn: Callable[..., Any], axes: Axes, holders: int) -> Found:
    import torch

    from dualpipe_lab import Mesh

    mesh = Mesh(Topology(axes))
    said = [("pp", "tp"), ("pp",), ("pp", "ep")]
    own = [
        (_piece(number, cut, {**mesh.coordinates, "pp": stage}, axes), cut, holders)
        for number, cut in enumerate(said)
        for stage in _stages(mesh.coordinates.get("pp", 0), dict(axes).get("pp", 1), holders)
    ]
    value = fn([(gradient.clone(), cut, count) for gradient, cut, count in own], mesh)
    if isinstance(value, float):
        value = torch.tensor(value, dtype=torch.float64)
    found = value.detach().reshape(()) if isinstance(value, torch.Tensor) and value.numel() == 1 else None
    true, twice = _squares(axes, said, holders)
    here = float(sum(gradient.square().sum() for gradient, _, _ in own))
    made = {
        "mirrored stages count twice in it": (twice if holders == 2 else float("nan")) ** 0.5,
        "mirrored stages count half in it": (true / 2 if holders == 2 else float("nan")) ** 0.5,
        "this is the squared norm": true,
        "this is the norm of this rank's gradients alone": here**0.5,
    }
    slips = {words: Numbers.of(torch.tensor(number, dtype=torch.float64)) for words, number in made.items()}
    right = Numbers.of(torch.tensor(true**0.5, dtype=torch.float64))
    return Found({"norm": Numbers.of(found)}, {"norm": right}, {"norm": slips})


def _stages(pp_rank: int, pp_size: int, holders: int) -> list[int]:
    """The stages of a rank: one, or under DualPipe two."""
    return [pp_rank] if holders == 1 else [pp_rank, pp_size - 1 - pp_rank]


def _piece(number: int, cut: Sequence[str], place: Mapping[str, int], axes: Axes) -> "Tensor":
    """The part of a summed gradient at these coordinates; the same along every axis that it is not cut along."""
    import torch

    seed = 100 * number + sum(7**power * (1 + place[name]) for power, (name, _) in enumerate(axes) if name in cut)
    return torch.randn(3 + number, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _squares(axes: Axes, said: Sequence[Sequence[str]], holders: int) -> tuple[float, float]:
    """The squared norm of the full model, and with every mirrored stage counted twice."""
    total = 0.0
    for number, cut in enumerate(said):
        along = [(name, size) for name, size in axes if name in cut]
        for place in product(*(range(size) for _, size in along)):
            here = dict(zip((name for name, _ in along), place, strict=True))
            total += float(_piece(number, cut, here, axes).square().sum())
    return total, holders * total


def _judge_reduce_gradients(fn: Callable[..., Any]) -> str:
    cases: list[Axes] = [
        [("dp", 2)],
        [("tp", 2)],
        [("dp", 2), ("tp", 2)],
        [("dp", 2), ("ep", 2)],
        [("pp", 2), ("cp", 2)],
        [("ep", 2), ("tp", 2)],
    ]
    for axes in cases:
        case = " x ".join(f"{name} {size}" for name, size in axes)
        most = len({sum_axes(axes, cut, partial) for cut, partial in _SAID} - {()})
        words = (
            "rank {rank} calls {found:g} all-reduces; its gradients have {most:g} groups, and one call each is enough"
        )
        limits = [Limit("calls of all_reduce", most, words, scope="each")]
        world = prod(size for _, size in axes)
        compare_on_ranks(_reduced, world, fn, axes, case=case, limits=limits)
    return f"{len(cases)} grids: every gradient over its own group, one all-reduce for each group"


def _judge_two_budgets(answer: object) -> str:
    plan = plan_of(answer, CONFIG, RANKS, LENGTH)
    if plan.pp > 1 or plan.precision != "float32":
        raise Wrong("this puzzle is about plans in float32 without a pipeline; use pp 1")
    try:
        traffic = plan.traffic(CONFIG, SEQUENCES, LENGTH)
    except ValueError as error:
        raise Wrong(str(error)) from None
    held = max(held_bytes(plan, rank) for rank in range(RANKS))
    sent = max(traffic.sent(rank, "gradients") for rank in range(RANKS))
    if held > HELD or sent > SENT:
        both = f"{plan}: a rank holds {held:,.0f} bytes of {HELD:,}, and sends {sent:,} of {SENT:,}"
        less = "fewer bytes held" if held > HELD else "fewer bytes sent"
        raise Wrong(f"{both}; it needs {less}", score=0.4 if held <= HELD or sent <= SENT else 0.0)
    return "within both budgets"


def _judge_full_norm(fn: Callable[..., Any]) -> str:
    cases: list[tuple[Axes, int]] = [
        ([("tp", 2)], 1),
        ([("pp", 2), ("dp", 2)], 1),
        ([("pp", 2), ("tp", 2)], 2),
        ([("pp", 4)], 2),
        ([("pp", 2), ("ep", 2)], 2),
    ]
    for axes, holders in cases:
        grid = " x ".join(f"{name} {size}" for name, size in axes)
        case = grid + (", mirrored stages" if holders == 2 else "")
        world = prod(size for _, size in axes)
        compare_on_ranks(_normed, world, fn, axes, holders, case=case, why=norm_in_words)
    return f"{len(cases)} grids, with mirrors and without: every element counts once"


groups = Predict(
    "sums-1",
    "Four groups",
    NAMES,
    lambda dp, ep, tp, ranks: (dp * ep, dp, ranks, ranks / dp),
    "x dp {dp} x ep {ep} x tp {tp}",
    ", on {ranks} ranks.",
    minutes=8,
    points=1,
    hints=(
        "For each parameter: along which axes is it the same, and along which of those do ranks see other tokens?",
        "DualPipe on two ranks of pp: each of the two holds both stages.",
        "Groups that are alike: all ranks over the ranks of one group.",
    ),
    slips=_SLIPS,
    dp=(3, 2, 4, 5, 6),
    ep=(4, 2, 8),
    tp=(2, 4),
    ranks=lambda dp, ep, tp: 2 * dp * ep * tp,
)

reduce_gradients = Implement(
    "sums-2",
    "Every sum of a step",
    "Write `reduce_gradients(parameters, said, mesh)`: each gradient becomes that of the mean over all tokens.",
    judge=_judge_reduce_gradients,
    minutes=25,
    points=3,
    hints=(
        "First the axes of one parameter's sum: those of data without its cut, and tp where its gradient is partial.",
        "Collect the gradients of one set of axes in a list of a dict, and concatenate them for one all-reduce.",
        "The loss of a rank is the mean over its own tokens: which number turns the sum of such means into a mean? "
        "It is the same for every parameter.",
    ),
)

two_budgets = Puzzle(
    "sums-3",
    "Two budgets",
    "Find a plan of 8 ranks within 3.3 MB per rank and 600 kB of gradients' messages.",
    judge=_judge_two_budgets,
    minutes=20,
    points=3,
    hints=(
        "print(lab.Plan(...).sums(config)) shows over how many ranks each gradient is summed.",
        "Experts are most of the model: each is summed over few ranks where ep is large. Attention is smaller on a "
        "rank where tp is larger, and its activations then travel, which this budget does not count.",
        "ZeRO-1 sends as many bytes as ZeRO-0 and holds fewer; ZeRO-3 sends more.",
    ),
)

full_norm = Repair(
    "sums-4",
    "The norm under DualPipe",
    "Repair the norm, in which mirrored stages count twice.",
    judge=_judge_full_norm,
    minutes=12,
    points=2,
    hints=(
        "4.1396 / 2.9272 is the square root of 2. Which elements count twice under DualPipe, and once under 1F1B?",
        "A square on n ranks has to count 1 / n on each. Which ranks hold a parameter whose stage is mirrored?",
    ),
)
