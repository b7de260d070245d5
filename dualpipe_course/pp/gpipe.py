"""Exercises of "GPipe": four parts of the trainer (rows, messages, stage, executor), its memory, its weights.

Chapter: book/pp/gpipe.  Programs are judged by the validator and the simulator, gradients against one process in
float64, live activations by tensors that are reachable and sends that are not waited for.
"""

import gc
import re
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from dualpipe_course.comparison import Found, Limit, Numbers, Off, in_words
from dualpipe_course.declared import Puzzle, Repair
from dualpipe_course.own.part import Alone, OnRanks, Part
from dualpipe_course.pp import gradients
from dualpipe_course.pp.gradients import ROWS, WIDTH
from dualpipe_course.pp.loops import only_whole_backwards
from dualpipe_course.pp.programs import parse
from dualpipe_course.start.ranks import all_waited_for
from dualpipe_course.trial import partial_score, smallest_failing
from dualpipe_course.wrong import Wrong
from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.program import B, F
from dualpipe_lab.pp.simulator import simulate

if TYPE_CHECKING:
    from torch import Tensor


WORDS = 7
# of the puzzle, with F = 1 and B = 2; GPipe with a flush after every three microbatches is the slowest
RANKS, MICROBATCHES, MAKESPAN, MEMORY, SLOWEST = 4, 8, 39, 3, 51


def _smaller(rows: tuple[int, ...]) -> Any:
    for place, number in enumerate(rows):
        if sum(rows) > number:  # a batch without rows has no mean
            yield rows[:place] + rows[place + 1 :]
        if number > 1:
            yield (*rows[:place], number - 1, *rows[place + 1 :])


def _judge_less_memory(answer: object) -> str:
    found = parse(answer, RANKS, MICROBATCHES)
    only_whole_backwards(found)
    timeline = simulate(found)
    peaks = [timeline.peak_activations(rank) for rank in range(RANKS)]
    if max(peaks) > MEMORY:
        worst = peaks.index(max(peaks))
        raise Wrong(
            f"{timeline.makespan} ticks, but rank {worst} holds {peaks[worst]} activations, the limit is {MEMORY}; "
            f"all {peaks}",
            picture=timeline,
        )
    if timeline.makespan > MAKESPAN:
        raise Wrong(
            f"it fits, with {timeline.makespan} ticks; {MAKESPAN} are possible. Rank 0 is idle for "
            f"{timeline.bubble_time(0)}",
            score=partial_score(timeline.makespan, SLOWEST, MAKESPAN),
            picture=timeline,
        )
    return f"{timeline.makespan} ticks with {sum(peaks)} activations in all; with room for 3 no order is quicker"


def _judge_unequal_microbatches(fn: Callable[..., Any]) -> str:
    cases = [(2,), (2, 2), (2, 1), (1, 2, 3), (1, 1, 4, 2, 2), (3, 0, 2)]
    reports = gradients.accumulate_reports(fn, cases)
    failing = next((case for case, report in zip(cases, reports, strict=True) if report), None)
    if failing is None:
        return "gradients and loss equal those of the whole batch, for equal and unequal microbatches"
    smallest = smallest_failing(failing, lambda case: bool(gradients.accumulate_reports(fn, [case])[0]), _smaller)
    raise Wrong(gradients.accumulate_reports(fn, [smallest])[0])


def _look_at_rows(p: int, m: int) -> str:
    """What is wrong with the rows of p stages and m microbatches, if anything."""
    from mine.rows_gpipe import gpipe_place, gpipe_rows

    rows = gpipe_rows(p, m)
    if not isinstance(rows, list):
        return f"gpipe_rows returned {type(rows).__name__}, expected a list of texts, one per stage"
    try:
        program = parse(rows, p, m)
    except Wrong as wrong:
        return wrong.message
    for stage in range(p):
        actions = list(program.actions(stage))
        kinds = [kind for _, kind, _ in actions]
        if strange := [str(action) for action in actions if action.kind not in (F, B)]:
            return f"row {stage} has {strange[0]}; here rows are F and whole B, and messages come with the next part"
        if F in kinds[kinds.index(B) :]:
            return f"row {stage} runs a forward after a backward; GPipe runs all forwards first: {rows[stage]}"
    if (ticks := simulate(program).makespan) > (best := 3 * (m + p - 1)):
        return f"{ticks} ticks with F 1 and B 2, (m + p - 1) (1 + 2) = {best} are possible: all rows need one order"
    places = {(stage, i): gpipe_place(stage, i) for stage in range(p) for i in range(m)}
    off = next((at for at, found in places.items() if found != at[0]), None)
    return f"gpipe_place{off} is {places[off]}: stage {off[0]} is at position {off[0]}" if off else ""


class Layout(NamedTuple):
    """Rows without messages, and which position runs a stage of a microbatch."""

    rows: list[str]
    place: Callable[[int, int], int]
    num_stages: int


def layout(name: str, p: int, m: int) -> Layout:
    """The library's rows for p ranks, or others of F and B: two stages per rank, or gradients that cross.

    >>> layout("v", 2, 1).rows
    ['0F0 3F0 3B0 0B0', '1F0 2F0 2B0 1B0']
    >>> layout("two flows", 2, 2).rows
    ['0F0 1F1 1B1 0B0', '0F1 1F0 1B0 0B1']
    """
    if name in ("v", "dualpipev"):
        place, num_stages = lambda stage, i: min(stage, 2 * p - 1 - stage), 2 * p
        work = [[(rank, range(m)), (2 * p - 1 - rank, range(m))] for rank in range(p)]
    else:
        is_one_way = name not in ("two flows", "dualpipe")
        place, num_stages = lambda stage, i: stage if is_one_way or i < m // 2 else p - 1 - stage, p
        work = [
            sorted([(rank, range(m // 2)), (p - 1 - rank, range(m // 2, m))], key=itemgetter(0)) for rank in range(p)
        ]
    if name == "nothing":
        return Layout([""] * p, place, num_stages)
    if name in ("v", "two flows"):
        return Layout([_there_and_back(one) for one in work], place, num_stages)
    rows = list(schedules.build("gpipe" if name == "crossed" else name, p, m).rows())
    if name == "crossed":  # the first rank takes the last gradient first
        rows[0] = " ".join([f"0F{i}" for i in range(m)] + [f"0B{i}" for i in reversed(range(m))])
    return Layout(rows, place, num_stages)


def _there_and_back(work: Sequence[tuple[int, range]]) -> str:
    """All forwards, the lower stage first, then all backwards, the higher stage first."""
    forwards = [f"{stage}F{i}" for stage, numbers in work for i in numbers]
    return " ".join(forwards + [f"{stage}B{i}" for stage, numbers in reversed(work) for i in numbers])


def _look_at_messages(name: str, p: int, m: int) -> str:
    """What is wrong with the messages of all rows, if anything."""
    from mine.row_messages import actions, kind_of, with_messages

    pair = "(1F4;2B0)OVERLAP_F_B"
    given = [actions("0SEND_F3"), actions(pair), kind_of("0SEND_F3"), kind_of("1I0"), kind_of(pair)]
    if given != [[(0, "SEND_F", 3)], [(1, "F", 4), (2, "B", 0)], "SEND", "I", "OVERLAP_F_B"]:
        return "actions and kind_of are given, and three later parts import them as they are"
    rows, place, num_stages = layout(name, p, m)
    for me, row in enumerate(rows):
        found = with_messages(row, me, place, num_stages)
        if not isinstance(found, str):
            return f"with_messages returned {type(found).__name__}, expected the row as one text"
        if problem := _misplaced(row, found.split(), me, place, num_stages):
            return f"position {me}: {problem}"
    return ""


def _misplaced(row: str, words: list[str], me: int, place: Callable[[int, int], int], num_stages: int) -> str:
    """The first message that is missing, too much or too late, in words."""
    steps, found = row.split(), []
    gaps: list[list[str]] = [[]]
    for word in words:
        if "SEND_" in word or "RECV_" in word:
            gaps[-1].append(word)
        else:
            found.append(word)
            gaps.append([])
    if found != steps:
        return f"without its messages the row is {' '.join(found) or 'empty'}, expected the steps of {row}"
    needs = [_messages_of(step, "RECV", me, place, num_stages) for step in steps] + [{}]
    makes = [{}, *(_messages_of(step, "SEND", me, place, num_stages) for step in steps)]
    for number, gap in enumerate(gaps):
        step, before = (steps[number : number + 1] or [""])[0], steps[number - 1] if number else ""
        for word, why in makes[number].items():
            if word not in gap:
                return f"{word} is not just after {before}: {why}"
        for word, why in needs[number].items():
            if word not in gap:
                return f"{word} is not just before {step}: {why}"
        known = [*makes[number], *needs[number]]
        if extra := [word for at, word in enumerate(gap) if word not in known or word in gap[:at]]:
            return f"{extra[0]} is not needed between {before or 'the start'} and {step or 'the end'}: " + _why_extra(
                extra[0], me, place, num_stages
            )
        if sorted(gap, key=lambda word: "RECV_" in word) != gap:
            return f"{' '.join(gap)}: a result is sent before the rank waits for what its next step needs"
    return ""


def _messages_of(step: str, message: str, me: int, place: Callable[[int, int], int], num_stages: int) -> dict[str, str]:
    """The messages that a step needs (RECV) or makes (SEND), each with the reason."""
    found = {}
    for stage, kind, i in re.findall(r"(\d+)([FBI])(\d+)", step):
        is_forward = kind == "F"
        other = int(stage) + (1 if is_forward == (message == "SEND") else -1)
        if 0 <= other < num_stages and (peer := place(other, int(i))) != me:
            why = f"stage {other} of microbatch {i} is at position {peer}"
            found[f"{stage}{message}_{'F' if is_forward else 'B'}{i}"] = why
    return found


def _why_extra(word: str, me: int, place: Callable[[int, int], int], num_stages: int) -> str:
    match = re.fullmatch(r"(\d+)(SEND|RECV)_([FB])(\d+)", word)
    if match is None:
        return "a message is a stage, SEND_F, RECV_F, SEND_B or RECV_B, and a microbatch"
    stage, i = int(match[1]), int(match[4])
    other = stage + (1 if (match[2] == "SEND") == (match[3] == "F") else -1)
    if not 0 <= other < num_stages:
        return f"there is no stage {other}"
    if place(other, i) == me:
        return f"stages {min(stage, other)} and {max(stage, other)} of microbatch {i} are both here"
    return "no step there needs or makes it; a W needs no message and makes none"


def _draw(seed: int, *shape: int) -> "Tensor":
    import torch

    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _kind_of_stage(kind: str) -> "tuple[Callable[[Tensor], Tensor], dict[str, Tensor]]":
    """A function, and its weights by name."""
    import torch

    if kind == "no weights":
        return lambda x: x * x, {}
    w = {name: _draw(seed, WIDTH, WIDTH).requires_grad_() for seed, name in enumerate(("up", "down", "not used"))}
    if kind == "words":
        w["table"] = _draw(5, WORDS, WIDTH).requires_grad_()
    return lambda x: torch.tanh((w["table"][x] if "table" in w else x) @ w["up"].T) @ w["down"].T, w


def _stage_input(kind: str, i: int) -> "Tensor":
    import torch

    if kind == "words":
        return torch.randint(WORDS, (ROWS,), generator=torch.Generator().manual_seed(20 + i))
    return _draw(20 if kind == "one x for all" else 20 + i, 0 if kind == "no tokens" else ROWS, WIDTH)


def _on_a_stage(rank: int, world_size: int, kind: str, words: str) -> Found:
    """Call forward and backward in the order of the words."""
    import torch
    from mine.stage import Stage

    from dualpipe_course.pp.saved import held

    f, w = _kind_of_stage(kind)
    for weight in w.values():
        weight.grad = torch.full_like(weight, gradients.OLD)
    dys, x = {i: _draw(40 + i, *_stage_input(kind, i).shape[:1], WIDTH) for i in range(3)}, _stage_input(kind, 0)
    held()
    gc.freeze()
    before, found, saved, stage = held(), {}, {}, Stage(f, w.values())
    for word in words.split():
        i = int(word[1:])
        if word[0] == "F":
            x = x if kind == "one x for all" else _stage_input(kind, i)
            y, saved[i] = stage.forward(x)
            if y.requires_grad:
                return Found(
                    {}, refused="y still has its graph: what is sent goes without, and `saved` keeps the graph"
                )
            if x.requires_grad:
                return Found({}, refused="forward has changed x, which now requires a gradient; work on x.detach()")
            found[f"y of {i}"] = Numbers.of(y)
        else:
            dx = stage.backward(saved.pop(i), dys[i])
            if kind == "words" and dx is not None:
                return Found({}, refused=f"x is integers, which have no gradient: return None, not {type(dx).__name__}")
            if kind != "words":
                found[f"dx of {i}"] = Numbers.of(dx)
    found |= {f"gradient of {name}": Numbers.of(_added(weight)) for name, weight in w.items()}
    x = y = dx = None
    saved.clear()  # of what had no backward
    for weight in w.values():
        weight.grad = None
    return Found(found, costs={"kept": held() - before})


def _plain_stage(rank: int, world_size: int, kind: str, words: str) -> "dict[str, Tensor]":
    import torch

    f, w = _kind_of_stage(kind)
    found, totals = {}, {name: torch.zeros_like(weight) for name, weight in w.items()}
    for i in sorted({int(word[1:]) for word in words.split()}):
        x = _stage_input(kind, i)
        leaves = list(w.values()) + ([x.requires_grad_()] if x.is_floating_point() else [])
        y = f(x)
        grads = torch.autograd.grad(y, leaves, _draw(40 + i, len(x), WIDTH), allow_unused=True)
        found[f"y of {i}"] = y.detach()
        if f"B{i}" not in words:
            continue
        if x.is_floating_point():
            found[f"dx of {i}"] = grads[-1]
        for name, grad in zip(w, grads, strict=False):
            totals[name] = totals[name] + (0 if grad is None else grad)
    return found | {f"gradient of {name}": total for name, total in totals.items()}


def _why_not_in_a_stage(off: Off) -> str:
    if _lacks_what_was_there(off):
        return f"{off.name} is that of this microbatch alone; a backward adds to what is there"
    if off.name.startswith("dx") and off.found is None:
        return f"{off.name} is missing: backward returns the gradient of its input, which x.detach() of the forward has"
    return in_words(off)


def _added(weight: "Tensor") -> "Tensor | None":
    """What backwards have added to a gradient that was there before."""
    return None if weight.grad is None else weight.grad - gradients.OLD


def _lacks_what_was_there(off: Off) -> bool:
    if not off.name.startswith("gradient") or off.found is None or off.has_other_shape:
        return False
    return all(abs(x + gradients.OLD - y) < 1e-9 for x, y in zip(off.found.flat, off.expected.flat, strict=True))


def _stage_weights(number: int, num_stages: int) -> "dict[str, Tensor]":
    w = {"w": _draw(number, WIDTH, WIDTH)}
    w |= {"table": _draw(90, WORDS, WIDTH)} if number == 0 else {}
    return w | ({"head": _draw(91, WORDS, WIDTH)} if number == num_stages - 1 else {})


def _stage_function(w: "Mapping[str, Tensor]") -> "Callable[[Tensor], Tensor]":
    import torch

    def f(x: "Tensor") -> "Tensor":
        x = torch.tanh((w["table"][x] if "table" in w else x) @ w["w"].T)
        return x @ w["head"].T if "head" in w else x

    return f


def _words(lengths: Sequence[int]) -> "tuple[list[Tensor], Callable[[Tensor, int], Tensor]]":
    """Microbatches of so many words, and a microbatch's share of the loss; the last of several has no targets."""
    import torch
    from torch.nn.functional import cross_entropy

    generator = torch.Generator().manual_seed(3)
    ids, targets = ([torch.randint(WORDS, (one,), generator=generator) for one in lengths] for _ in range(2))
    if len(lengths) > 1:
        targets[-1][:] = -100
    total = sum(int((one >= 0).sum()) for one in targets)
    return ids, lambda y, i: cross_entropy(y, targets[i], ignore_index=-100, reduction="sum") / total


class _Live:
    """Notes at every forward what a rank holds, and how many sends to the next position it has not waited for."""

    def __init__(self, after: int | None, before: int | None, weights: "list[Tensor]") -> None:
        from dualpipe_course.pp.saved import held

        self.after, self.before, self.sends, self.kept = after, before, 0, 0.0
        self.weights = [(weight, weight.grad) for weight in weights]
        held()
        gc.freeze()  # what is there already need not be looked through at every start
        self.at_first = held()

    def around(self, f: "Callable[[Tensor], Tensor]") -> "Callable[[Tensor], Tensor]":
        def noted(x: "Tensor") -> "Tensor":
            from dualpipe_course.pp.saved import held

            new_grads = sum(weight.numel() for weight, grad in self.weights if weight.grad is not grad)
            kept = (held() - self.at_first - new_grads) / (2 * WIDTH)
            self.kept = max(self.kept, kept - len(self._under_way(self.before)))
            self.sends = max(self.sends, len(self._under_way(self.after)))
            return f(x)

        return noted

    def _under_way(self, peer: int | None) -> set[int]:
        from dualpipe_lab.launch.context import rank_context

        works: list[Any] = list(rank_context().in_flight.values())
        return {work.tag for work in works if work.sends and work.peer == peer}


def _on_a_row(rank: int, world_size: int, ranks: list[int], name: str, lengths: tuple[int, ...]) -> Found:
    """Execute the row of this rank's position."""
    import torch
    from mine.execute import KINDS, execute
    from mine.row_messages import with_messages
    from mine.stage import Stage

    if rank not in ranks:
        return Found({}, costs={"sends": 0, "kept": 0})
    me, m = ranks.index(rank), len(lengths)
    rows, place, num_stages = layout(name, len(ranks), m)
    weights = {stage: _stage_weights(stage, num_stages) for stage in _stages_at(me, place, num_stages, m)}
    for weight in [weight for w in weights.values() for weight in w.values()]:
        weight.requires_grad_().grad = torch.full_like(weight, gradients.OLD)
    if name == "zero_bubble_h1":
        KINDS.update(I=_whole_at_i, W=_nothing_at_w)  # as a later part does
    ids, loss = _words(lengths)
    after, before = (ranks[at] if 0 <= at < len(ranks) else None for at in (me + 1, me - 1))
    live = _Live(after, before, [x for w in weights.values() for x in w.values()])
    stages = {stage: Stage(live.around(_stage_function(w)), w.values()) for stage, w in weights.items()}
    row = with_messages(rows[me], me, place, num_stages)
    losses = execute(row, stages, lambda stage, i: ranks[place(stage, i)], num_stages, ids, loss)
    all_waited_for()
    here = [i for i in range(m) if place(num_stages - 1, i) == me]
    if not isinstance(losses, dict) or sorted(losses) != here:
        what = f"losses of microbatches {sorted(losses)}" if isinstance(losses, dict) else type(losses).__name__
        return Found({}, refused=f"execute returned {what}, expected those of {here}: the last stage has them")
    found = {f"loss of microbatch {i}": losses[i] for i in here}
    found |= {f"gradient of {key}, stage {stage}": _added(x) for stage, w in weights.items() for key, x in w.items()}
    return Found(
        {key: Numbers.of(value) for key, value in found.items()}, costs={"sends": live.sends, "kept": live.kept}
    )


def _whole_at_i(run: Any, token: str) -> None:
    (stage, i) = map(int, token.split("I"))
    run.after_b(stage, i, run.stages[stage].backward(*run.before_b(stage, i)))
    run.saved[stage, "W", i] = token


def _nothing_at_w(run: Any, token: str) -> None:
    stage, i = map(int, token.split("W"))
    del run.saved[stage, "W", i]


def _stages_at(me: int, place: Callable[[int, int], int], num_stages: int, m: int) -> list[int]:
    return [stage for stage in range(num_stages) if any(place(stage, i) == me for i in range(m))]


def _one_process(
    rank: int, world_size: int, ranks: list[int], name: str, lengths: tuple[int, ...]
) -> "dict[str, Tensor | None]":
    import torch

    _, place, num_stages = layout(name, len(ranks), len(lengths))
    weights = [_stage_weights(stage, num_stages) for stage in range(num_stages)]
    named = {f"gradient of {key}, stage {at}": (at, x) for at, w in enumerate(weights) for key, x in w.items()}
    me = ranks.index(rank) if rank in ranks else -1
    here = _stages_at(me, place, num_stages, len(lengths))
    losses: dict[str, Tensor | None] = {}
    total = {key: torch.zeros_like(x) if at in here else None for key, (at, x) in named.items()}
    ids, loss = _words(lengths)
    for i, x in enumerate(ids):
        for w in weights:
            x = _stage_function({key: one.requires_grad_() for key, one in w.items()})(x)
        share = loss(x, i)
        grads = torch.autograd.grad(share, [x for _, x in named.values()])
        losses[f"loss of microbatch {i}"] = share.detach() if place(num_stages - 1, i) == me else None
        for (key, (at, _)), grad in zip(named.items(), grads, strict=True):
            if total[key] is not None and place(at, i) == me:
                total[key] += grad
    return losses | total


def _row_costs(world_size: int, ranks: list[int], name: str, lengths: tuple[int, ...]) -> list[Limit]:
    p, m = len(ranks), len(lengths)
    if name != "1f1b":
        return []
    live = [min(p - ranks.index(rank), m) if rank in ranks else 0 for rank in range(world_size)]
    return [
        Limit(
            "sends",
            live,
            "rank {rank} has {found} sends of activations that are not waited for, and each keeps its buffer; {most} "
            "are enough: when the gradient of a microbatch has arrived, its activation has, so wait for that send then",
            scope="each",
        ),
        Limit(
            "kept",
            [2 * number + 3 for number in live],
            "rank {rank} keeps {found:g} tensors of {most} at most: what has been used or sent is to be forgotten, by "
            "pop or del",
            scope="each",
        ),
    ]


def _why_not_in_a_row(off: Off) -> str:
    if _lacks_what_was_there(off):
        return f"{off.name} lacks what was there before the step; gradients add up"
    if off.ratio is not None and 0 < off.ratio < 1:
        return f"{in_words(off)}; loss(y, i) is already a share of the total, and nothing divides it again"
    return in_words(off)


def _unknown_word(rank: int, world_size: int, token: str) -> Found:
    """Execute a word that no kind has."""
    from mine.execute import KINDS, execute

    try:
        execute(token, {}, lambda stage, i: 0, 1, [], lambda y, i: y)
    except Exception as error:
        said = str(error)
        if missing := [kind for kind in (token.strip("0"), *KINDS) if kind not in said]:
            words = f"raised {type(error).__name__}: {said}, which does not name {missing[0]}"
            return Found({}, refused=f"{words}; say the word that is not known, and the known ones")
        return Found({})
    return Found({}, refused=f"{token} was passed over; a word that is not known raises, with the known ones")


rows_gpipe = Part(
    "gpipe-6",
    "rows_gpipe",
    "GPipe as text",
    "Write gpipe_rows and gpipe_place.",
    names=("gpipe_rows", "gpipe_place"),
    trials=(Alone(_look_at_rows, ((1, 1), (1, 3), (2, 1), (2, 3), (4, 2), (4, 8), (8, 20)), "p = {}, m = {}"),),
    right="7 sizes, all forwards first, (m + p - 1) (t_F + t_B) ticks",
    minutes=10,
    points=3,
    hints=(
        "A word is a stage, a kind and a microbatch without blanks between: 0F3. A row is its words with blanks.",
        "Row s is sF0 sF1 ... and then sB0 sB1 ...; every stage has the same order.",
        '" ".join(f"{stage}{kind}{i}" for kind in "FB" for i in range(m)) is the row of a stage, and gpipe_place '
        "returns its stage.",
    ),
)

row_messages = Part(
    "gpipe-7",
    "row_messages",
    "A row with its messages",
    "Write with_messages(row, me, place, num_stages), for every kind of work.",
    names=("Place", "actions", "kind_of", "with_messages"),
    trials=(
        Alone(
            _look_at_messages,
            (
                ("nothing", 1, 0),
                ("gpipe", 1, 2),
                ("gpipe", 2, 1),
                ("gpipe", 3, 2),
                ("1f1b", 4, 8),
                ("zero_bubble_h1", 3, 4),
                ("v", 2, 2),
                ("dualpipev", 1, 2),
                ("dualpipe", 2, 4),
                ("dualpipe", 4, 10),
                ("dualpipev", 3, 7),
            ),
            "rows of {}, {} rank(s), {} microbatches",
        ),
    ),
    right="11 programs, with pairs, weight gradients, and two stages on one rank",
    minutes=35,
    points=4,
    hints=(
        "Go through the words of the row, and for each word through actions(word): a pair has two. Where does an F "
        "get its input from, and to which stage does its output go? And a B or an I?",
        "An F of stage s needs stage s - 1 and feeds stage s + 1, a B or an I the other way round, a W neither. There "
        "is a message only where that stage exists and place(that stage, i) is not me.",
        'way, source, target = ("F", s - 1, s + 1) if kind == "F" else ("B", s + 1, s - 1). A list before gets '
        'f"{s}RECV_{way}{i}" for the source and a list after f"{s}SEND_{way}{i}" for the target; then append before, '
        "the word, after.",
    ),
)

stage = Part(
    "gpipe-8",
    "stage",
    "What a stage keeps",
    "Write Stage, a function whose forward and backward are called apart.",
    names=("Stage",),
    trials=(
        OnRanks(
            _on_a_stage,
            (
                (1, "no weights", "F0 B0"),
                (1, "numbers", "F0 B0"),
                (1, "numbers", "F0 F1 B0 B1"),
                (1, "numbers", "F0 F1 F2 B2 B0"),
                (1, "one x for all", "F0 F1 B0 B1"),
                (1, "words", "F0 F1 B1 B0"),
                (1, "no tokens", "F0 B0"),
            ),
            _plain_stage,
            "a stage of {1}, {2}",
            (
                Limit(
                    "kept",
                    0,
                    "when all is done {found} numbers are still kept; what a backward needs is in `saved`, and nowhere "
                    "else",
                ),
            ),
            _why_not_in_a_stage,
        ),
    ),
    right="7 orders of forwards and backwards; numbers, words, no tokens, no weights",
    minutes=25,
    points=3,
    hints=(
        "The chain rule is cut at both ends: x comes without a graph and y leaves without one. What is between them "
        "has to be kept until the backward.",
        "x.detach().requires_grad_() is a new leaf, whose .grad is what the stage before waits for. Integers can have "
        "no gradient: x.is_floating_point() says so.",
        "forward: x = x.detach().requires_grad_(x.is_floating_point()); y = self.f(x); return y.detach(), (x, y). "
        "backward: torch.autograd.backward(y, dy), then x.grad.",
    ),
)

execute = Part(
    "gpipe-9",
    "execute",
    "An executor of rows",
    "Write the four functions of KINDS, and execute.",
    names=("Run", "KINDS", "execute"),
    trials=(
        OnRanks(
            _on_a_row,
            (
                (1, [0], "gpipe", (2,)),
                (1, [0], "gpipe", (3, 2)),
                (2, [0, 1], "gpipe", (2,)),
                (2, [0, 1], "gpipe", (2, 3, 1)),
                (3, [2, 0], "gpipe", (2, 0, 3)),
                (1, [0], "v", (2, 1)),
                (2, [1, 0], "v", (2, 3, 2)),
                (2, [0, 1], "two flows", (2, 1, 3, 2)),
                (3, [0, 1, 2], "zero_bubble_h1", (2, 2, 1)),
                (2, [0, 1], "crossed", (2, 1, 3)),
                (2, [0, 1], "1f1b", (2,) * 16),
                (4, [0, 1, 2, 3], "1f1b", (2,) * 9),
            ),
            _one_process,
            "{2} on ranks {1} of {0}, microbatches of {3} tokens",
            _row_costs,
            _why_not_in_a_row,
        ),
        OnRanks(_unknown_word, ((1, "0X0"),), named="a word {1}"),
    ),
    right="12 rows on 1 to 4 ranks equal one process, 1F1B keeps at most p - rank sends, and an unknown word raises",
    minutes=85,
    points=5,
    hints=(
        "Read Run first: its before_f, after_f, before_b and after_b are all that F and B need. run_f is one line "
        "between before_f and after_f. What arrives belongs into run.arrived, what leaves is in run.leaving.",
        'A message is named after the stage that it is for: 0SEND_F2 takes run.leaving["F", 1, 2], sends it to '
        'run.peers(1, 2) with run.tag("F", 1, 2), and keeps the works. 1RECV_F2 comes from run.peers(0, 2) with the '
        "same tag. For gradients the stages count down.",
        'When 0RECV_B3 has arrived: for work in run.works.pop(("F", 0, 3), []): work.wait(). At the end of execute '
        "wait for what is left in run.works. In between: for token in row.split(): KINDS[kind_of(token)](run, token).",
    ),
)


less_memory = Puzzle(
    "gpipe-4",
    "Room for three",
    "Find a program of F and B for 4 ranks and 8 microbatches: 39 ticks, at most 3 live activations per rank.",
    judge=_judge_less_memory,
    minutes=20,
    points=2,
    hints=(
        "From its F on rank 0 to the end of its B there, a microbatch takes 4 + 8 ticks if it never waits. With room "
        "for 3, how many such hops follow one another?",
        "Which is more urgent on rank 1, a backward that makes room on rank 0 or a forward that fills the ranks below?",
        "Let every rank run a backward as soon as its gradient is there, and a forward only where none is. Rank 1 "
        "begins 1F0 1F1 1F2 1B0 1B1 1F3.",
    ),
)

unequal_microbatches = Repair(
    "gpipe-5",
    "The mean of means",
    "Repair `accumulate(model, loss_fn, inputs, targets)` for microbatches of unequal size.",
    judge=_judge_unequal_microbatches,
    minutes=10,
    points=2,
    trail=True,
    hints=(
        "Compare the gradients for microbatches of 2 and 2 rows, then of 3 and 1.",
        "loss_fn is the mean over the rows of one microbatch. Which share of the batch's rows is that?",
        "A microbatch weighs by its rows over all rows. 1/M is that only where all have equally many.",
    ),
)
