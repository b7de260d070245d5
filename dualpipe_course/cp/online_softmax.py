"""Exercises of "Online softmax": the part `softmax`, an entropy that loses its scale.

Chapter: book/cp/online-softmax.  States merge in any order and grouping, in float64, and describe the whole row.
Functions that know all scores at once are switched off for the entropy.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from dualpipe_course.comparison import Found, Numbers, Off, Unchanged, in_words, other_dtype
from dualpipe_course.declared import Repair
from dualpipe_course.differences import apart
from dualpipe_course.own.part import OnRanks, Part
from dualpipe_course.own.rules import ATTENTION
from dualpipe_course.switched_off import Without
from dualpipe_course.trial import on_ranks
from dualpipe_course.wrong import Wrong

if TYPE_CHECKING:
    from torch import Tensor

LIBRARY = ("dualpipe_lab.cp.softmax", "dualpipe_lab.cp.online_softmax")
HEADS, SIZE = 2, 3
# a process, what the scores are, the queries, the keys of each block
CASES = (
    (1, "one block", 3, (4,)),
    (1, "two blocks", 3, (3, 2)),
    (1, "blocks of one key", 2, (1, 1, 1, 1)),
    (1, "queries thousands apart", 3, (2, 3)),
    (1, "heads thousands apart", 2, (2, 2)),
    (1, "a hidden block first", 3, (2, 3, 1)),
    (1, "a hidden block last", 3, (3, 2)),
    (1, "a hidden query", 3, (2, 2)),
    (1, "blocks without keys", 3, (0, 3, 0, 2)),
    (1, "no queries", 0, (2, 3)),
)
TREES = ("merged from the left", "merged from the right", "merged in another order")
# the scores, the keys of each block
ROWS_OF_BLOCKS = (
    ("descending scores", (2, 2, 2, 1)), ("ascending scores", (2, 2, 2, 1)), ("any scores", (1,) * 7),
    ("any scores", (3, 3, 1)), ("huge scores", (2, 2, 2, 1)), ("scores that rise by 1,600", (2, 1, 3)),
    ("scores that fall by 1,600", (1, 4, 2)),
)  # fmt: skip
TOLERANCE = 1e-10


def _why(found: list[float], expected: list[float], tolerance: float = TOLERANCE) -> str | None:
    if len(found) != len(expected):
        return f"{len(found)} numbers came out, expected {len(expected)}"
    for place, (a, b) in enumerate(zip(found, expected, strict=True)):
        if not abs(a - b) <= tolerance * max(1.0, abs(b)):
            what = f"is not a number, expected {b:.6g}" if a != a else apart(a, b, tolerance * max(1.0, abs(b)))
            return f"number {place} of the output {what}"
    return None


def _states(rank: int, world_size: int, kind: str, queries: int, keys: tuple[int, ...]) -> Found:
    """What three orders of merges say of a row: the mean of the values, the LSE, and the sum where all is hidden."""
    from mine.softmax import merge, state_of

    scores, values = _blocks(kind, queries, keys)
    given = Unchanged(**{f"{name} of block {i}": of[i] for i in range(len(keys)) for name, of in
                         (("scores", scores), ("values", values))})  # fmt: skip
    states = [state_of(s, v) for s, v in zip(scores, values, strict=True)]
    orders = [list(range(len(keys))), list(range(len(keys))), [*range(1, len(keys), 2), *range(0, len(keys), 2)]]
    found: dict[str, Numbers | None] = {}
    for tree, order, at in zip(TREES, orders, (0, -2, 0), strict=True):
        known = [states[i] for i in order]
        if refused := next((words for state in known if (words := _not_a_state(state, queries))), ""):
            return Found({}, refused=f"state_of: {refused}")
        while len(known) > 1:
            place = at % len(known)
            parts = [part for state in known[place:][:2] for part in state]
            both = Unchanged(**{str(i): part for i, part in enumerate(parts) if not part.isnan().any()})
            known[place : place + 2] = [merge(known[place], known[place + 1])]
            refused = "it has changed a state that it was given; make a new one" if both.first() else ""
            if refused := refused or _not_a_state(known[place], queries):
                return Found({}, refused=f"merge: {refused}")
        found |= {name: Numbers.of(value) for name, value in _in_numbers(tree, *known[0]).items()}
    changed = given.first()
    return Found(found, changed=f"the {changed} have changed; leave the arguments as they are" if changed else "")


def _not_a_state(state: Any, queries: int) -> str:
    import torch

    if not isinstance(state, tuple) or len(state) != 3 or not all(isinstance(part, torch.Tensor) for part in state):
        return "a state is a tuple of three tensors, (top, total, sum)"
    shapes = [list(part.shape) for part in state]
    if shapes != (right := [[HEADS, queries], [HEADS, queries], [HEADS, queries, SIZE]]):
        return f"top, total and sum have the shapes {shapes}, needed are {right}: one of each per head and query"
    return other_dtype(torch.zeros((), dtype=torch.float64), *state)


def _in_numbers(tree: str, top: "Tensor", total: "Tensor", values: "Tensor") -> "dict[str, Tensor]":
    divisor = total.masked_fill(total == 0, 1)[..., None]
    return {
        f"top + ln(total), {tree},": top + total.log(),
        f"sum / total, {tree},": values / divisor,
        f"the total, 0 where all keys are hidden, {tree},": total * (top + total.log()).isneginf(),
    }


def _whole_rows(rank: int, world_size: int, kind: str, queries: int, keys: tuple[int, ...]) -> "dict[str, Tensor]":
    import torch

    scores, values = _blocks(kind, queries, keys)
    x, v = torch.cat(scores, 2), torch.cat(values, 1)
    lse, mean = x.logsumexp(2), x.softmax(2).nan_to_num(0) @ v
    return {
        name: value
        for tree in TREES
        for name, value in {
            f"top + ln(total), {tree},": lse,
            f"sum / total, {tree},": mean,
            f"the total, 0 where all keys are hidden, {tree},": torch.zeros_like(lse),
        }.items()
    }


def _blocks(kind: str, queries: int, keys: tuple[int, ...]) -> "tuple[list[Tensor], list[Tensor]]":
    """Scores (h, q, k) and values (h, k, d) of a case, block by block."""
    import torch

    generator = torch.Generator().manual_seed(sum(keys) + len(kind))
    x = 2 * torch.randn(HEADS, queries, sum(keys), dtype=torch.float64, generator=generator)
    values = torch.randn(HEADS, sum(keys), SIZE, dtype=torch.float64, generator=generator)
    if kind == "queries thousands apart":
        x[:, 0], x[:, 1, 2] = x[:, 0] - 4000, 4000
    if kind == "heads thousands apart":
        x[0] -= 4000
    if kind == "a hidden query":
        x[:, 1] = -torch.inf
    blocks = list(x.clone().split(keys, 2))
    if kind == "a hidden block first":
        blocks[0][:] = -torch.inf
    if kind == "a hidden block last":
        blocks[-1][:] = -torch.inf
    return [block.clone() for block in blocks], [part.clone() for part in values.split(keys, 1)]


def _why_no_state(off: Off) -> str:
    if off.found is None or off.has_other_shape:
        return in_words(off)
    if any(value != value for value in off.found.flat):
        return f"{off.name} is not a number: -inf - -inf is none; subtract 0 where the maximum is -inf"
    lost = -float("inf") in off.found.flat and "top" in off.name
    if lost and off.found.flat[off.place] == -float("inf"):
        return (
            f"{off.name} is -inf for number {off.place}, which sees keys: all of its exponentials are 0. "
            "Was the maximum of another row subtracted? Each query of each head has a maximum of its own"
        )
    if off.name.startswith("top"):
        return f"{in_words(off)}. In a merge each total is multiplied by exp(its own top - the larger top)"
    if off.name.startswith("sum"):
        return f"{in_words(off)}. The sum of values shrinks by the same factor as the total"
    return in_words(off)


def _once(blocks: "tuple[Tensor, ...]", alive: list[int]) -> "Iterator[Tensor]":
    """Hand out blocks, each of which turns to NaN when the next one is asked for, and note what is alive after each."""
    import torch

    from dualpipe_lab.dp.measure import live_tensors, storage_bytes

    alive.append(0)
    for part in blocks:
        block = part.clone()
        yield block
        block.fill_(torch.nan)
        del block
        alive.append(storage_bytes(live_tensors()))


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
        out = torch.as_tensor(fn(_once(x.split(keys), alive)))
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


def _judge_entropy(fn: Callable[..., Any]) -> str:
    results = on_ranks(_run_entropy, 1, Without(fn, *LIBRARY), case="your function")
    for case, found, expected, allowed, slips, number, alive in results[0]:
        if any(value != value for value in found):
            raise Wrong(
                f"{case}: the entropy is not a number. A block's numbers are overwritten with NaN once the next one is "
                "asked for; exp(710) is inf, and inf / inf and 0 * inf are NaN"
            )
        if len(alive) - 1 != number:
            raise Wrong(f"{case}: {max(len(alive) - 1, 0)} of {number} blocks were asked for")
        if len(alive) > 4 and alive[-1] > alive[2]:
            raise Wrong(
                f"{case}: tensors of {alive[2]:,} bytes are alive after two blocks and {alive[-1]:,} at the end; three "
                "numbers are known of all blocks so far, however many"
            )
        problem = _why(found, [expected], allowed)
        like = [
            words for words, value in slips.items() if problem is not None and _why(found, [value], allowed) is None
        ]
        if problem is not None:
            raise Wrong(f"{case}: {problem}{like[0] if like else ''}")
    return "right for scores in any order, huge ones included, in one pass"


softmax = Part(
    "online_softmax-4",
    "softmax",
    "A state that merges",
    "Write state_of and merge: what is known of a block of scores, and of two blocks together.",
    names=("state_of", "merge"),
    off=ATTENTION,
    trials=(OnRanks(_states, CASES, _whole_rows, "{1}, {2} queries, blocks of {3} keys", why=_why_no_state),),
    right=f"{len(CASES)} kinds of blocks, each merged from the left, from the right and in another order",
    minutes=35,
    points=4,
    hints=(
        "top is the largest score of each query of each head, total its sum of exp(score - top), sum the same sum "
        "with the values: weights @ values.",
        "merge takes the larger top, and multiplies total and sum of each side by exp(top of this side - larger top); "
        "sum has one dimension more.",
        "-inf - -inf is no number: subtract top.masked_fill(top == -torch.inf, 0). A block may have no keys, and amax "
        "refuses that: append a column of -inf before it, torch.cat([scores, none], -1).amax(-1).",
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
