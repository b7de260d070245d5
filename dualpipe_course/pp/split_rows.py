"""Judging a function that follows one rank's row of F, I and W: what its gradients add up to after each of two steps.

In: the learner's function.  Out: what is wrong, or an empty string.
  order       F at each start of the stage, I where a gradient of its output first comes
  products    of a row without W: two per layer, one for F and one for I
  kept        nothing by autograd at an F before which every microbatch has had its W
"""

from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from dualpipe_course.differences import TOLERANCE
from dualpipe_course.pp.gradients import make_batch, make_stage
from dualpipe_lab.pp.program import F, I, W

if TYPE_CHECKING:
    from torch import Tensor

    from dualpipe_course.pp.saved import Saved

LEGAL = (
    "F0 I0",
    "F0 I0 W0 F1 I1 W1",
    "F0 I0 W0",
    "F0 I0 F1 I1 W0",
    "F0 I0 F1 I1 W0 W1",
    "F0 F1 I0 I1 W1 W0",
    "F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 W2 W3 W4",
)
ILLEGAL = ("F0 W0 I0", "F0 I0 F1 W1 I1 W0")
NUM_MICROBATCHES, ROWS = 5, 3  # equal, so that a wrong pairing of microbatches does not stop by its shapes


def try_rows(rank: int, world_size: int, fn: Callable[..., Any]) -> str:
    """Run the learner's function for two steps of each row, or once on an illegal one; say what is wrong first."""
    for row in (*LEGAL, *ILLEGAL):
        if problem := _try_row(fn, row):
            return f"{row}: {problem}"
    return ""


def _try_row(fn: Callable[..., Any], row: str) -> str:
    from dualpipe_course.pp.saved import Saved

    stage, (inputs, dys) = make_stage(0), make_batch([ROWS] * NUM_MICROBATCHES)
    if row in ILLEGAL:
        try:
            fn(stage, row, inputs, dys)
        except ValueError:
            return ""
        except Exception as error:
            return f"raised {type(error).__name__}: {error}; expected a ValueError that names the W"
        early = _early(row)
        return f"{early} comes before {I}{early[1:]} without an error; expected a ValueError"
    words, saved = _watch(stage, inputs), Saved()
    kept = _watch_kept(stage, row, saved)
    expected_sent = [_grads(m, m)[0] for m in _numbers_of(row, I)]
    for step in (1, 2):
        with saved:
            sent = fn(stage, row, inputs, dys)
        if not isinstance(sent, list) or len(sent) != len(expected_sent):
            return f"returned {_what(sent)}, expected {len(expected_sent)} gradients, one per I"
        if not all(map(_close, sent, expected_sent)):
            return "the gradients of the inputs are wrong"
        if problem := _report([p.grad for p in stage.parameters()], row, step):
            return f"after step {step}, {problem}"
        if problem := _other_order(words, row):
            return problem
        if kept:
            return kept[0]
        words.clear()
    return _too_many_products(fn, row)


def _watch(stage: Any, inputs: "list[Tensor]") -> list[str]:
    """A list into which the stage writes F and the microbatch at each start, and I where its gradient first comes."""
    import torch

    words: list[str] = []

    def starts(module: Any, args: tuple[Any, ...], y: "Tensor") -> None:
        m = next((m for m, x in enumerate(inputs) if torch.equal(x, args[0])), -1)
        words.append(f"{F}{m}")
        if y.requires_grad:
            y.register_hook(lambda dy: words.append(f"{I}{m}") if f"{I}{m}" not in words else None)

    stage.register_forward_hook(starts)
    return words


def _watch_kept(stage: Any, row: str, saved: "Saved") -> list[str]:
    """A list into which the stage writes what autograd still keeps at an F before which all W have run."""
    words, found, number = row.split(), [], count()
    places = [place for place, word in enumerate(words) if word[0] == F]

    def starts(*_: Any) -> None:
        place = places[next(number) % len(places)]
        if place and saved.live and set(_numbers_of(row, F)[: places.index(place)]) <= _done(words[:place]):
            found.append(
                f"{words[place]} starts while autograd keeps {saved.live} tensors of microbatches whose W has run; a W "
                "is the last to need its graph: let it go, without retain_graph"
            )

    stage.register_forward_pre_hook(starts)
    return found


def _done(words: Sequence[str]) -> set[int]:
    return {int(word[1:]) for word in words if word[0] == W}


def _other_order(found: list[str], row: str) -> str:
    """Say what has run in another order than the row's, if anything."""
    expected = [word for word in row.split() if word[0] != W]
    if found == expected:
        return ""
    return f"ran {' '.join(found)}, the row is {' '.join(expected)} without its W"


def _too_many_products(fn: Callable[..., Any], row: str) -> str:
    """Say whether an I does the work of its W already: only where no W is asked for can that be told."""
    from dualpipe_course.pp.products import Products

    if W in row:
        return ""
    stage, (inputs, dys) = make_stage(0), make_batch([ROWS] * NUM_MICROBATCHES)
    with Products() as counted:
        fn(stage, row, inputs, dys)
    layers = sum(p.dim() > 1 for p in stage.parameters())
    if counted.number <= 2 * layers:
        return ""
    return (
        f"{counted.number} matrix products in {layers} layers, F and I make {2 * layers}; "
        "those of the weights' gradients wait for W"
    )


def _early(row: str) -> str:
    """Name the first W that comes before its own I."""
    words = row.split()
    return next(w for w in words if w[0] == W and words.index(w) < words.index(I + w[1:]))


def _report(found: Sequence["Tensor | None"], row: str, step: int) -> str:
    done = _numbers_of(row, W)
    if not done:
        made = any(grad is not None and bool(grad.any()) for grad in found)
        return "the weights have a gradient; an I makes none, that waits for its W" if made else ""
    if any(grad is None for grad in found):
        return "a parameter has no gradient"
    if _all_close(found, _total([(m, m) for m in done] * step)):
        return ""
    if step > 1 and _all_close(found, _total([(m, m) for m in done])):
        return "the gradients of the step before are gone"
    last, stale = done[-1], _stale(row)
    if len(done) > 1 and _all_close(found, _total([(last, last)])):
        return f"the gradient is that of microbatch {last} alone: the last W has replaced what was there"
    if len(done) > 1 and _all_close(found, _total([(last, stale[last])])):
        return f"only W{last} counts, and it started from the gradient that arrived for microbatch {stale[last]}"
    if _all_close(found, _total(list(stale.items()) * step)):
        m = next(m for m in done if stale[m] != m)
        return f"W{m} started from the gradient that arrived for microbatch {stale[m]}, the latest one"
    return "the gradients are not the sum over the microbatches"


def _stale(row: str) -> dict[int, int]:
    """For every W, the microbatch of the I that ran last before it."""
    found, latest = {}, -1
    for word in row.split():
        if word[0] == I:
            latest = int(word[1:])
        elif word[0] == W:
            found[int(word[1:])] = latest
    return found


def _numbers_of(row: str, kind: str) -> list[int]:
    return [int(word[1:]) for word in row.split() if word[0] == kind]


def _total(pairs: Sequence[tuple[int, int]]) -> "list[Tensor]":
    """The sum of weight gradients of (microbatch, the one that its dy is from)."""
    columns = zip(*(_grads(m, k)[1:] for m, k in pairs), strict=True)
    return [sum(column[1:], start=column[0]) for column in columns]


def _grads(m: int, of: int) -> "tuple[Tensor, ...]":
    """Gradients of the input and of every parameter, for microbatch m and the dy of another."""
    import torch

    stage, (inputs, dys) = make_stage(0), make_batch([ROWS] * NUM_MICROBATCHES)
    x = inputs[m].requires_grad_()
    grads: tuple[Tensor, ...] = torch.autograd.grad(stage(x), [x, *stage.parameters()], dys[of])
    return grads


def _all_close(found: Sequence[Any], expected: "Sequence[Tensor]") -> bool:
    return all(map(_close, found, expected))


def _close(found: Any, expected: "Tensor") -> bool:
    import torch

    same_shape = isinstance(found, torch.Tensor) and found.shape == expected.shape
    return same_shape and bool((found - expected).abs().max() <= 100 * TOLERANCE)


def _what(sent: object) -> str:
    return f"{len(sent)} of them" if isinstance(sent, list) else type(sent).__name__
