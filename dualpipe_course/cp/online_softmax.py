"""Exercises of "Online softmax": two blocks by hand, a state that merges in any order, an entropy that loses its scale.

Chapter: book/cp/online-softmax.  States are opaque: whatever an answer carries, the output of any tree of merges must
be that of the whole row, in float64.  Functions that know all scores at once are switched off.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from dualpipe_course.cp.passing import SPOILT, check_once, once
from dualpipe_course.declared import Implement, Predict, Repair
from dualpipe_course.differences import apart
from dualpipe_course.switched_off import Without
from dualpipe_course.trial import needs_function, on_ranks
from dualpipe_course.variants import Known
from dualpipe_course.wrong import Wrong

if TYPE_CHECKING:
    from torch import Tensor

LIBRARY = ("dualpipe_lab.cp.softmax", "dualpipe_lab.cp.online_softmax")
NAMES = ("the sum l", "A", "the average", "reads for weights", "reads for an average")
ROWS, SIZE = 3, 2
# what a case is, and the keys of its blocks
CASES = (
    ("one block", (4,)), ("two blocks", (3, 2)), ("blocks of one key", (1, 1, 1, 1)), ("rows thousands apart", (2, 3)),
    ("a hidden block first", (2, 3, 1)), ("a hidden block last", (3, 2)), ("a hidden row", (2, 2)),
    ("a block without keys", (0, 3, 0, 2)),
)  # fmt: skip
# the scores, the keys of each block
ROWS_OF_BLOCKS = (
    ("descending scores", (2, 2, 2, 1)), ("ascending scores", (2, 2, 2, 1)), ("any scores", (1,) * 7),
    ("any scores", (3, 3, 1)), ("huge scores", (2, 2, 2, 1)), ("scores that rise by 1,600", (2, 1, 3)),
    ("scores that fall by 1,600", (1, 4, 2)),
)  # fmt: skip
TOLERANCE = 1e-10


def _slips_by_hand(s: int, a: int, n: int) -> Known:
    return (
        (
            (8 + s, "the first block was measured from ln 2, a quarter of the common maximum"),
            (32 + s, "the factor is 2/8, not 8/2"),
        ),
        ((4 + a, "the weighted sum was measured from ln 2 too: it shrinks by the same factor as the sum"),),
        ((a / s, "A / l is divided once, at the end; averages of blocks do not add up"),),
        (
            (3 * n, "that is the safe softmax; maximum and sum take one pass together here"),
            (n, "the weights come after"),
        ),
        ((2 * n, "A is carried along: nothing is read again"), (0, "each score must be seen once")),
    )


def _why(found: list[float], expected: list[float], tolerance: float = TOLERANCE) -> str | None:
    if len(found) != len(expected):
        return f"{len(found)} numbers came out, expected {len(expected)}"
    for place, (a, b) in enumerate(zip(found, expected, strict=True)):
        if not abs(a - b) <= tolerance * max(1.0, abs(b)):
            what = f"is not a number, expected {b:.6g}" if a != a else apart(a, b, tolerance * max(1.0, abs(b)))
            return f"number {place} of the output {what}"
    return None


def _blocks(case: str, keys: tuple[int, ...]) -> "tuple[list[Tensor], list[Tensor]]":
    """Scores and values of a case, block by block."""
    import torch

    generator = torch.Generator().manual_seed(sum(keys) + len(case))
    x = 2 * torch.randn(ROWS, sum(keys), dtype=torch.float64, generator=generator)
    values = torch.randn(sum(keys), SIZE, dtype=torch.float64, generator=generator)
    if case == "rows thousands apart":
        x[0], x[1, 2] = x[0] - 4000, 4000
    if case == "a hidden row":
        x[1] = -torch.inf
    blocks = list(x.clone().split(keys, 1))
    if case == "a hidden block first":
        blocks[0][:] = -torch.inf
    if case == "a hidden block last":
        blocks[-1][:] = -torch.inf
    return blocks, list(values.split(keys))


def _run_states(
    rank: int, world_size: int, fn: Callable[..., Any], functions: object
) -> list[tuple[str, str, list[float], list[float], float]]:
    import torch

    results = []
    for case, keys in CASES:
        blocks, values = _blocks(case, keys)
        x, v = torch.cat(blocks, 1), torch.cat(values)
        expected = torch.softmax(x, 1).nan_to_num(0) @ v
        results.append((case, blocks, values, expected.flatten().tolist()))
    found = []
    for case, blocks, values, wanted in results:
        for tree, out, growth in fn(functions, blocks, values):
            found.append((case, tree, torch.as_tensor(out).flatten().tolist(), wanted, growth))
    return found


def _all_trees(functions: Any, blocks: "list[Tensor]", values: "list[Tensor]") -> list[tuple[str, Any, float]]:
    """Merge from the left, from the right, and in another order; how much larger the last state is than the first."""
    state_of, merge, output = functions
    ways: list[tuple[str, list[int], int]] = [
        ("merged from the left", list(range(len(blocks))), 0),
        ("merged from the right", list(range(len(blocks))), -2),
        ("merged in another order", [*range(1, len(blocks), 2), *range(0, len(blocks), 2)], 0),
    ]
    found = []
    for tree, order, at in ways:
        known = [state_of(blocks[i].clone(), values[i].clone()) for i in order]
        largest = max(_size(state) for state in known)
        while len(known) > 1:
            place = at % len(known)
            known[place : place + 2] = [merge(known[place], known[place + 1])]
        found.append((tree, output(known[0]), _size(known[0]) / max(largest, 1)))
    return found


def _size(state: "tuple[Tensor, ...]") -> int:
    import torch

    return sum(torch.as_tensor(part).numel() for part in state)


def _run_entropy(
    rank: int, world_size: int, fn: Callable[..., Any]
) -> list[tuple[str, list[float], float, float, dict[str, float], int, list[int]]]:
    import gc

    import torch

    gc.freeze()  # what the library holds is not the answer's
    results = []
    for name, keys in ROWS_OF_BLOCKS:
        x = _scores(name, keys)
        alive: list[int] = []
        out = torch.as_tensor(fn(scores for (scores,) in once(((part.clone(),) for part in x.split(keys)), alive)))
        log_p = torch.log_softmax(x, 0)
        expected = float(-(log_p.exp() * log_p).sum())
        # a power of x - LSE is off by eps |x|, relative to itself, and is multiplied by x
        allowed = max(TOLERANCE, 8 * torch.finfo(x.dtype).eps * float(x.abs().max()) ** 2)
        case, found = f"{name} in blocks of {', '.join(map(str, keys))}", out.double().flatten().tolist()
        results.append((case, found, expected, allowed, _slips(x, keys), len(keys), alive))
    return results


def _scores(name: str, keys: tuple[int, ...]) -> "Tensor":
    import torch

    generator = torch.Generator().manual_seed(keys[0])
    x = 3 * torch.randn(sum(keys), dtype=torch.float64, generator=generator)
    if "cending" in name:
        x = x.sort(descending=name.startswith("de")).values
    if "by 1,600" in name:
        levels = [1600.0 * block for block, length in enumerate(keys) for _ in range(length)]
        x = x + (1 if "rise" in name else -1) * torch.tensor(levels, dtype=torch.float64)
    return 1000 * x if name == "huge scores" else x


def _slips(x: "Tensor", keys: tuple[int, ...]) -> dict[str, float]:
    """What comes out if E is not rescaled at all, and if it is rescaled as a sum of values is."""
    import torch

    m = torch.tensor(-torch.inf, dtype=torch.float64)
    total, unscaled, unshifted = x.new_zeros(3)
    for block in x.split(keys):
        largest = torch.maximum(m, block.max())
        powers, factor = (block - largest).exp(), (m - largest).exp()
        terms = (powers * (block - largest)).sum()
        total, unscaled, unshifted = factor * total + powers.sum(), unscaled + terms, factor * unshifted + terms
        m = largest
    return {
        ". Powers that were measured from different maxima were added up in E": float(total.log() - unscaled / total),
        ". The powers in E are rescaled; the x - m that they multiply are still measured from the maxima of their "
        "time": float(total.log() - unshifted / total),
    }


def _judge_states(state_of: Callable[..., Any], merge: Callable[..., Any], output: Callable[..., Any]) -> str:
    for fn in (state_of, merge, output):
        needs_function(fn)
    fn = Without(_all_trees, *LIBRARY)
    results = on_ranks(_run_states, 1, fn, (state_of, merge, output), case="your functions")
    for case, tree, found, expected, growth in results[0]:
        if (problem := _why(found, expected)) is not None:
            raise Wrong(f"{case}, {tree}: {problem}")
        if growth > 1:
            raise Wrong(
                f"{case}, {tree}: the merged state has {growth:.3g} times the numbers of its largest block's: it grows "
                "with the number of keys; what is known fits into two numbers and one value per row"
            )
    return f"the output is the same for {len(CASES)} kinds of blocks in every order and grouping that was tried"


def _judge_entropy(fn: Callable[..., Any]) -> str:
    results = on_ranks(_run_entropy, 1, Without(fn, *LIBRARY), case="your function")
    for case, found, expected, allowed, slips, number, alive in results[0]:
        if any(value != value for value in found):
            raise Wrong(
                f"{case}: the entropy is not a number. A block's {SPOILT}; exp(710) is inf, and inf / inf and "
                "0 * inf are NaN"
            )
        check_once(case, "blocks", number, alive, "three numbers are known of all blocks so far, however many")
        problem = _why(found, [expected], allowed)
        like = [
            words for words, value in slips.items() if problem is not None and _why(found, [value], allowed) is None
        ]
        if problem is not None:
            raise Wrong(f"{case}: {problem}{like[0] if like else ''}")
    return "right for scores in any order, huge ones included, in one pass"


numbers = Predict(
    "online_softmax-1",
    "Two blocks, by hand",
    NAMES,
    lambda s, a, n: (2 + s, 1 + a, Fraction(1 + a, 2 + s), 2 * n, n),
    ", {s} and {a}.",
    "a row of {n:,} scores",
    minutes=5,
    points=1,
    trail=True,
    hints=(
        "The larger maximum is ln 8. By which factor do numbers shrink that were measured from ln 2?",
        "The factor is 2/8, for l and for A alike. The other block keeps its numbers.",
        "Weights need the finished pair before they can be written: the scores are read again. An average does not.",
    ),
    slips=_slips_by_hand,
    s=(5, 3, 4, 6, 7, 8),
    a=(20, 9, 11, 14, 17, 23, 26, 29, 35),
    n=(1000, 2000, 3000, 500),
    called={"s": "l of the second block", "a": "its A", "n": "scores of a row"},
)

states = Implement(
    "online_softmax-2",
    "A state that merges",
    "Write `state_of`, `merge` and `output`, which give the same for any blocks in any order and grouping.",
    judge=_judge_states,
    minutes=25,
    points=4,
    hints=(
        "A state is (m, l, A): largest score, sum of exp(x - m), and the same sum with values. One of each per row.",
        "merge takes the larger m and multiplies l and A of each side by exp(m - larger), m being that side's own.",
        "Subtract 0 where the larger m is -inf, and divide by 1 where l is 0. A column of -inf, appended before the "
        "maximum, makes a block without keys an ordinary one.",
    ),
)

entropy = Repair(
    "online_softmax-3",
    "Right if the best comes first",
    "Repair a one-pass entropy that is right only while the maximum does not rise.",
    judge=_judge_entropy,
    minutes=15,
    points=2,
    trail=True,
    hints=(
        "Print l and E after each block, for scores in ascending order. Which maximum does each of them belong to?",
        "E has the maximum in two places: in the powers, and in what the powers are multiplied by.",
        "What becomes of a sum of w (x - m) if m rises by d? Which other sum, known already, takes part? Mind the "
        "first block, whose old maximum is -inf; or find a sum that has no maximum in the second place.",
    ),
)
