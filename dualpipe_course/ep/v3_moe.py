"""Exercises of "V3-MoE structure": sizes, an expert of every kept group, loads counted once, a bias, failed experts.

Chapter: book/ep/v3-moe.  Choices are judged by trying all sets of groups, loads by what a backward came through, the
bias after a step on ranks with and without microbatches.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dualpipe_course.declared import Implement, Predict, Repair
from dualpipe_course.ep import routed_runs as runs
from dualpipe_course.switched_off import Without
from dualpipe_course.trial import call_each, ended, on_ranks
from dualpipe_course.variants import Known
from dualpipe_course.wrong import Wrong

if TYPE_CHECKING:
    from torch import Tensor

NAMES = ("parameters of an expert", "experts that compute", "bytes of a row", "first expert", "percent")
STEPS = (
    runs.Step((2, 2)), runs.Step((3,)), runs.Step((1, 3, 0)), runs.Step((0, 2, 1, 1)),
    runs.Step((1, 2), ((0, 3), (1, 2), (4, 5), (0, 1), (2, 3), (4, 5), (0, 3))),  # 3 2 2 3 2 2
    runs.Step((2, 1), ((0, 3), (1, 2), (4, 5), (0, 1), (2, 3), (4, 0), (1, 2), (3, 5))),  # 3 3 3 3 2 2
    runs.Step((0, 0)),
)  # fmt: skip
SCALES = (1, 1e12, 1e300)  # no number of the answer's own is below all values
SIZES = ((8, 2, 4, 2), (8, 4, 4, 2), (6, 3, 6, 3), (12, 3, 3, 1), (12, 5, 4, 3), (16, 6, 4, 2))  # E, k, groups, kept


def _slips(h: int, f: int, k: int) -> Known:
    return (
        (
            (h * f, "that is one matrix; gate, up and down are three"),
            (2 * h * f, "gate, up and down are three matrices"),
        ),
        (
            (k, "every token uses the shared ones too"),
            (66, "that is how many there are"),
            (k + 1, "there are two shared ones"),
        ),
        ((h, "the scales travel too"), (h + h // 128, "a scale has 4 bytes"), (2 * h, "fp8 has one byte per number")),
        (
            (0, "that is the order without the bias: 0.6 + 0.35 is more than 0.9"),
            (4, "a group is worth the sum of its two best: (4, 5) has 0.9 and is left out"),
        ),
        (
            (51, "that is 0.95 / 1.85; the bias is for the selection alone"),
            (60, "that is the weight of the other one"),
            (63, "that is 0.95 / 1.5; the bias is for the selection alone"),
            (22, "divide by the scores of the chosen experts, not of all"),
        ),
    )


def _judge_worth(sizes: str, row: Sequence[float], alive: Sequence[bool], found: Sequence[float]) -> None:
    size = len(row) // len(found)
    for group, ours in enumerate(found):
        values = [row[i] for i in range(group * size, (group + 1) * size) if alive[i]]
        right = sum(sorted(values)[-2:]) if values else float("-inf")
        if ours != right and (not values or not abs(ours - right) <= 1e-12 * abs(right)):
            living = ", ".join(f"{value:.3g}" for value in values) or "no expert"
            raise Wrong(f"{sizes}: group {group} has {living} alive and is worth {right:.3g}, not {ours:.3g}")


def _values(num_experts: int) -> list["Tensor"]:
    import torch

    generator = torch.Generator().manual_seed(num_experts)
    drawn = torch.rand(8, num_experts, generator=generator, dtype=torch.float64)
    found = [drawn, drawn - 0.5, drawn.log(), (3 * drawn).round() - 1]  # in the last many are equal
    for values in found:  # the least value of all in a group that is kept, the first and the last one
        values[6, :2] = values.new_tensor([99.0, -9.0])
        values[7, -2:] = values.new_tensor([99.0, -9.0])
    return found


def _judge_choice(
    sizes: str, row: Sequence[float], chosen: Sequence[int], k: int, num_groups: int, num_kept: int
) -> None:
    size = len(row) // num_groups
    worth = [sum(sorted(row[group * size :][:size])[-2:]) for group in range(num_groups)]
    kept = sorted(sorted(range(num_groups), key=lambda group: -worth[group])[:num_kept])  # sorts are stable
    allowed = [group * size + i for group in kept for i in range(size)]
    firsts = [max(range(group * size, (group + 1) * size), key=lambda i: row[i]) for group in kept]
    others = sorted((i for i in allowed if i not in firsts), key=lambda i: -row[i])[: k - num_kept]
    best = sorted(sorted(firsts + others), key=lambda i: -row[i])
    if list(chosen) == best:
        return
    values = ", ".join(f"{value:.3g}" for value in row)
    where = f"{sizes}: values {values}"
    if outside := [i for i in chosen if i not in allowed]:
        group = outside[0] // size
        raise Wrong(f"{where}: expert {outside[0]} is of group {group}, worth {worth[group]:.3g}, which is not kept")
    if sorted(chosen) == sorted(best):
        raise Wrong(f"{where}: the right experts, but not the best first, or equals not by number: {list(chosen)}")
    if idle := [group for group in kept if group not in [i // size for i in chosen]]:
        raise Wrong(f"{where}: group {idle[0]} is kept and gives no expert; chose {list(chosen)}, should be {best}")
    raise Wrong(f"{where}: chose {list(chosen)}, groups {kept} are kept, and {best} are to be chosen")


def _judge_selection(fn: Callable[..., Any]) -> str:
    import torch

    cases = [(s * values, *sizes[1:]) for sizes in SIZES for values in _values(sizes[0]) for s in (1, 1e12)]
    answers = call_each(
        Without(fn, "dualpipe_lab.ep.deepseek_moe:group_limited_topk"), [(case[0].clone(), *case[1:]) for case in cases]
    )
    for (values, k, num_groups, num_kept), (is_fine, found) in zip(cases, answers, strict=True):
        sizes = f"{values.shape[1]} experts, k = {k}, {num_kept} of {num_groups} groups"
        if not is_fine:
            raise Wrong(ended(sizes, found))
        if not isinstance(found, torch.Tensor) or found.shape != (len(values), k) or found.dtype != torch.int64:
            raise Wrong(f"{sizes}: return indices of shape [{len(values)}, {k}], whole numbers, as topk gives them")
        for row, chosen in zip(values.tolist(), found.tolist(), strict=True):
            _judge_choice(sizes, row, chosen, k, num_groups, num_kept)
    return f"{len(cases)} cases, with negative and with equal values: every kept group gives an expert"


def _judge_counted(router: Callable[..., Any], case: Any) -> None:
    found, expected, fault = on_ranks(runs.loads, 1, router, case, case=", ".join(case))[0]
    if fault:
        raise Wrong(f"{', '.join(case)}: {fault}")
    if found != expected:
        raise Wrong(
            f"{', '.join(case)}: load {found}, should be {expected}. A call counts once for each backward that "
            "comes through its weights, however often its forward runs"
        )


def _judge_one_move(router: Callable[..., Any], fn: Callable[..., Any]) -> str:
    import torch

    for step in STEPS:
        where = str(step)
        results = on_ranks(runs.moved, len(step.counts), router, fn, step, case=where)
        start, expected, right = runs.plain_move(router, step)
        biases = [torch.tensor(bias, dtype=torch.float64) for bias, _ in results]
        if any(not torch.equal(bias, biases[0]) for bias in biases):
            raise Wrong(f"{where}: afterwards the ranks have different biases; each moved by what it saw itself")
        if bad := (biases[0] != expected).nonzero().flatten().tolist():
            by = (biases[0] - start)[bad[0]] / runs.SPEED
            raise Wrong(
                f"{where}: expert {bad[0]} had {int(right[bad[0]])} tokens of {int(right.sum())} in the step, mean "
                f"{float(right.double().mean()):.4g}; its bias moved by {float(by):.4g} times the speed"
            )
        calls = max(sent for _, sent in results)
        if calls > 1:
            raise Wrong(f"{where}: {calls} collectives on a rank; one sum of all loads is enough")
    return f"{len(STEPS)} steps on 1 to 4 ranks: one move by the load of all, the same on every rank, one message"


def _judge_living(fn: Callable[..., Any]) -> str:
    import torch

    drawn = [
        (scale * values, e, groups)
        for e, _, groups, _ in SIZES
        if e > groups
        for values in _values(e)
        for scale in SCALES
    ]
    generator = torch.Generator().manual_seed(0)
    cases = [(values, torch.rand(e, generator=generator) < 0.6, groups) for values, e, groups in drawn]
    answers = call_each(fn, [(values.clone(), alive.clone(), groups) for values, alive, groups in cases])
    for (values, alive, groups), (is_fine, found) in zip(cases, answers, strict=True):
        sizes = f"{values.shape[1]} experts in {groups} groups, alive {alive.int().tolist()}"
        if not is_fine:
            raise Wrong(ended(sizes, found))
        if getattr(found, "shape", None) != (len(values), groups):
            raise Wrong(f"{sizes}: return worths of shape {[len(values), groups]}")
        for row, ours in zip(values.tolist(), found.tolist(), strict=True):
            _judge_worth(sizes, row, alive.tolist(), ours)
    return f"{len(cases)} cases: groups with two living experts, one or none, whatever the sign and size of the values"


numbers = Predict(
    "v3_moe-1",
    "A smaller sister",
    NAMES,
    lambda h, f, k: (3 * h * f, k + 2, h + h // 32, 3, 40),
    "three matrices of {h} by {f}.",
    "A token uses {k} routed experts.",
    "has a row of {h} numbers",
    minutes=10,
    points=1,
    trail=True,
    hints=(
        "A row of 2048 numbers has 16 scales.",
        "With the bias, the groups are worth 1.0, 1.45 and 0.9. Which two stay, and what is the largest value in them?",
        "The bias helps to choose. The weight is a score divided by the sum of the two chosen scores.",
    ),
    slips=_slips,
    h=(2048, 1024, 3072, 4096),
    f=(1024, 512, 1536, 2048),
    k=(6, 4, 8),
    called={"h": "numbers of a row", "f": "width of an expert", "k": "routed experts"},
)

selection = Implement(
    "v3_moe-2",
    "Every message has a use",
    "Write `choose(values, k, num_groups, num_kept)`: experts from the best groups, at least one from each.",
    judge=_judge_selection,
    minutes=15,
    points=3,
    hints=(
        "Three steps: which groups, the best expert of each, then the best of what is left in these groups.",
        "topk does not say which of two equals it takes. x.sort(dim=1, descending=True, stable=True) does.",
        "In the end sort by number first and then, stably, by value. A group may have a single expert.",
    ),
)

counted = Repair(
    "v3_moe-3",
    "Counted twice",
    "Repair `Router`, which counts tokens in its forward: recomputed ones twice, and those of evaluations.",
    cases=[(case,) for case in runs.PASSES],
    judge=_judge_counted,
    right=f"{len(runs.PASSES)} ways through a step: counted once for each backward, checkpointed or not",
    minutes=10,
    points=2,
    trail=True,
    hints=(
        "How often does a forward run under a checkpoint, and how often does a backward come through?",
        "torch.is_grad_enabled() is no answer: one kind of checkpoint runs both of its forwards with gradients.",
        "tensor.register_hook(fn) calls fn when a gradient arrives; a tensor that needs none has no hooks.",
    ),
)

one_move = Repair(
    "v3_moe-4",
    "One step, one move",
    "Repair `train_step(router, microbatches, speed)`, which moves a bias per microbatch and rank.",
    judge=_judge_one_move,
    minutes=10,
    points=3,
    hints=(
        "How often is the bias moved on a rank with three microbatches, and how often on one with none?",
        "Add the loads of all microbatches up first. Then all ranks need the same sum.",
        "A rank without microbatches has a load of zeros, and takes part in the message.",
    ),
)

living = Repair(
    "v3_moe-5",
    "Experts that are away",
    "Repair `worth(values, alive, num_groups)`, which gives up a group that has one living expert.",
    judge=_judge_living,
    minutes=10,
    points=2,
    hints=(
        "What is 0.9 plus minus infinity, and which groups have that sum?",
        "A mask is right for choosing; a sum needs a number that adds nothing. ",
        "Take the best and the second apart: only the second may be left out of the sum.",
    ),
)
