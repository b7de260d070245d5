"""Four trainings that the parts make possible, each beside one process: losses, raw first gradients, weights.

    check.run("dense")       tensor 2 x data 2: tokens cut, tokens whole, the head as a ZeRO-3 unit
    check.run("pipeline")    one executor under GPipe, 1F1B and ZB-H1
    check.run("experts")     ring attention, router, exchange and experts on 1, 2 and 4 ranks
    check.run("together")    pipeline 2 x a group of 2 under DualPipe, then DualPipeV; one step measured and counted

The parts are the learner's where they have passed, and the course's elsewhere.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dualpipe_course import record, registry
from dualpipe_course.exercise import Check, CheckFailed, Kind, Verdict, in_notebook, update_start_page
from dualpipe_course.own import finder, folder
from dualpipe_course.own.part import Part
from dualpipe_course.own.parts import PARTS, RUNS, number_of
from dualpipe_course.own.rules import check_text
from dualpipe_course.own.trainings import CASES, Found, difference
from dualpipe_course.trial import on_ranks
from dualpipe_course.wrong import Wrong

if TYPE_CHECKING:
    from torch import Tensor

    from dualpipe_ours.plain_model import Name, Trained

    Named = dict[Name, Tensor]

SECONDS = 120.0


def run(name: str) -> None:
    """Run one of the four; print how far it is from one process, and whose parts it has called.

    Raises:
        ValueError: there is no such run.
        CheckFailed: it is not equal to one process.
    """
    __tracebackhide__ = True
    if name not in RUNS:
        raise ValueError(f"there is no run {name}; use one of {', '.join(RUNS)}")
    texts = {part: folder.text(part) for part in PARTS}
    folder.name_official(RUNS[name])
    try:
        worst = judge(name, texts)
    except Wrong as wrong:
        raise CheckFailed(Verdict(f"run {name}", False, 0.0, wrong.message)) from None
    record.note(number_of(name), True)
    update_start_page()
    mine = [part for part in RUNS[name] if folder.is_own(part)]
    print(f"{name}: equal to one process; the largest difference in losses, first gradients and weights is {worst:.0e}")
    print(f"yours: {len(mine)} of the {len(RUNS[name])} parts that it calls{': ' * bool(mine)}{', '.join(mine)}")
    if name == "together":
        _show_a_step(texts)


def _show_a_step(texts: Mapping[str, str]) -> None:
    """The measured timeline of DualPipe over the simulated one, and the bytes beside the derived ones."""
    from dualpipe_course.own.looked_at import look

    try:
        found = look(texts)
    except Wrong as wrong:  # the training is right, but a part does not keep to the tables that are looked at
        print(f"a step cannot be shown: {wrong.message}")
        return
    if in_notebook():
        from IPython.display import display

        from dualpipe_lab.viz import compare

        display(compare(found.simulated, found.measured))
    else:
        print(found.simulated, found.measured, sep="\n\n", end="\n\n")
    print(found)


def part_of(name: str) -> str:
    """The part that an exercise is, or nothing for another one."""
    check = registry.find(name)
    return check.part if isinstance(check, Part) else ""


def part_check(part: str) -> Part:
    """The check of a part."""
    return next(one for one in registry.topic(PARTS[part]) if isinstance(one, Part) and one.part == part)


def judge(name: str, texts: Mapping[str, str], num_steps: int = 20) -> float:
    """Run one of the four with the texts of all parts; return the largest difference from one process.

    `num_steps` is for DualPipe alone.

    Raises:
        Wrong: a difference is larger than 1e-10.
    """
    worst = 0.0
    for case in CASES[name](num_steps):
        what = f"{name}, {case.words}"
        found = on_ranks(_on_a_rank, case.num_ranks, dict(texts), case.run, case.args, case=what, seconds=SECONDS)
        wanted = on_ranks(_on_one_process, 1, case.reference, case="the reference", seconds=SECONDS)[0]
        for rank, ours in enumerate(found):
            off, words = difference(case, rank, ours, wanted)
            if words:
                raise Wrong(f"{what}: rank {rank}: {words}")
            worst = max(worst, off)
        held = {name for ours in found for name in ours.weights}
        if held and (missing := set(wanted.weights) - held):
            raise Wrong(f"{what}: no rank holds {', '.join(sorted({name for _, name, _ in missing}))}")
    return worst


class RunCheck(Check):
    """One of the four as a whole, for graders: the answer has the texts of a learner's parts, by name, as JSON."""

    kind: Kind = "run"

    def __init__(self, run: str) -> None:
        asks = f"Train by your own parts: {', '.join(RUNS[run])}."
        super().__init__(number_of(run), f"The run {run}", asks, minutes=5, points=3, hints=(), trail=False)
        self.run = run

    def judge(self, *answers: Any, seed: int | None = None) -> str:
        """Run it with the parts of an answer, and the course's where there is none."""
        texts: dict[str, str] = json.loads(answers[0])
        for part, text in texts.items():
            check = part_check(part)
            try:
                check_text(part, text, check.names, check.off)
            except Wrong as wrong:
                raise Wrong(f"mine.{part}: {wrong.message}") from None
        judge(self.run, {part: finder.official(part) for part in PARTS} | texts, num_steps=4)
        own = [part for part in RUNS[self.run] if part in texts]
        return f"equal to one process, by {len(own)} of {len(RUNS[self.run])} parts of one's own"


CHECKS = {name: RunCheck(name) for name in RUNS}


def find(name: str) -> Check | None:
    """The check of an exercise or of a run, if there is one."""
    return next((check for check in CHECKS.values() if check.name == name), None) or registry.find(name)


def called(name: str, texts: Mapping[str, str]) -> set[str]:
    """The parts of which a run calls a function."""
    parts: set[str] = set()
    for case in CASES[name](1):
        results = on_ranks(
            _on_a_rank, case.num_ranks, dict(texts), case.run, case.args, True, case=case.words, seconds=SECONDS
        )
        parts |= {part for found in results for part in found.parts}
    return parts


def _on_a_rank(
    rank: int,
    world_size: int,
    texts: Mapping[str, str],
    run: Callable[..., Any],
    args: Sequence[Any],
    noting: bool = False,
) -> Found:
    import inspect
    import sys

    finder.install(texts.__getitem__)
    parts: set[str] = set()

    def note(frame: Any, event: str, arg: object) -> None:
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_OPTIMIZED  # the body of a module or class is none
        if event == "call" and is_function and code.co_filename.startswith(f"{finder.PACKAGE}/"):
            parts.add(code.co_filename.removeprefix(f"{finder.PACKAGE}/").removesuffix(".py"))

    sys.setprofile(note if noting else None)
    try:
        made = run(rank, *args)
    finally:
        sys.setprofile(None)
    return Found(made[0], made[1], made[2], frozenset(parts))


def _on_one_process(rank: int, world_size: int, reference: "Callable[[], Trained]") -> Found:
    return Found(*reference(), frozenset())
