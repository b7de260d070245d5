"""Exercises of "The schedule studio": its ten challenges, judged by the validator and the simulator.

Chapter: book/pp/studio.  The page judges by the same rules, so an answer that is found there can be pasted.
"""

from typing import NamedTuple

from dualpipe_course.declared import Puzzle
from dualpipe_course.pp import challenges
from dualpipe_course.pp.challenges import CHALLENGES
from dualpipe_course.pp.programs import parse
from dualpipe_course.wrong import Wrong
from dualpipe_lab.pp.simulator import simulate
from dualpipe_lab.pp.studio import Challenge
from dualpipe_lab.pp.validation.rules import routes
from dualpipe_lab.timeline import Timeline


class Judged(NamedTuple):
    """A solved challenge: its run, and whether it earns the star of time and that of memory."""

    timeline: Timeline
    time: bool
    memory: bool

    @property
    def stars(self) -> str:
        """The stars in words."""
        won = [name for name in ("time", "memory") if getattr(self, name)]
        return f"with the star of {' and of '.join(won)}" if won else "the stars of time and of memory are still open"


def judge(challenge: Challenge, answer: object) -> Judged:
    """Judge rows of text as the page does.

    Raises:
        Wrong: they do not solve the challenge, and why.
    """
    found = parse(answer, challenge.ranks, challenge.microbatches, challenge.stages)
    program = challenge.program(found.rows())
    if (taken := len(set(routes(program)))) > challenge.directions:
        copies = "one copy of every stage is" if challenge.directions == 1 else "two copies of every stage are"
        raise Wrong(f"microbatches take {taken} routes through the ranks; {copies} allowed")
    timeline = simulate(program, challenge.cost)
    try:
        return Judged(timeline, **challenge.stars(timeline))
    except ValueError as refused:
        raise Wrong(str(refused), picture=timeline) from None


def _puzzle(challenge: Challenge, minutes: int, points: int, *hints: str) -> Puzzle:
    name = f"studio-{CHALLENGES.index(challenge) + 1}"

    def solve(answer: object) -> str:
        found = judge(challenge, answer)
        held = max(map(found.timeline.peak_activations, range(challenge.ranks)))
        return f"{found.timeline.makespan} ticks, at most {held} activations on a rank; {found.stars}"

    return Puzzle(name, challenge.title, challenge.text, judge=solve, minutes=minutes, points=points, hints=hints)


mend = _puzzle(
    challenges.MEND, 5, 1,
    "Rank 0 waits for a gradient that rank 1 makes after 1F1, and 1F1 waits for 0F1 on rank 0.",
    "Either rank 0 runs 0F1 earlier, or rank 1 runs 1B0 earlier. Which of the two ends sooner?",
)  # fmt: skip
once = _puzzle(
    challenges.ONCE, 5, 1,
    "The validator lists all three. Stage 1 is on rank 1: what does 1B1 do on rank 0?",
    "Make 1B1 of the second 1F1, and 0B1 of what stands on rank 0.",
)  # fmt: skip
nothing = _puzzle(
    challenges.NOTHING, 15, 2,
    "Before its first backward rank r runs 3 - r forwards; after that one backward and one forward in turn.",
    "Rank 2 begins 2F0 2B0 2F1 2B1, rank 1 begins 1F0 1F1 1B0 1F2.",
    "For the star of time split every B: W fills the gaps at the end. For that of memory let a rank begin a third "
    "microbatch only after the W of the first.",
)  # fmt: skip
less = _puzzle(
    challenges.LESS, 10, 2,
    "A backward can run as soon as its gradient is there. How many forwards does rank 0 need until then?",
    "1F1B takes as long as GPipe and holds 4 on rank 0.",
)  # fmt: skip
room = _puzzle(
    challenges.ROOM, 25, 3,
    "An activation is held from F to the end of B, or of W. From F on rank 0 until its gradient is back it takes "
    "2 + 3 ticks at least: with room for two, two microbatches share that time.",
    "With I and W apart the gradient goes up a tick earlier at every rank.",
    "Let rank 1 run both forwards before the first I: 1F0 1F1 1I0 1W0 1I1 1W1 1F2 1F3.",
)  # fmt: skip
split = _puzzle(
    challenges.SPLIT, 15, 2,
    "Rank 0 waits longest at the end, while the last gradients come up. What could it run then?",
    "Split each B. Leave I where B was, and move W to where the rank waits; with room for 4 rank 3 delays three.",
)  # fmt: skip
copies = _puzzle(
    challenges.COPIES, 20, 3,
    "Microbatches 2 and 3 may enter on rank 1 and leave on rank 0: then rank 1 runs 0F2 and rank 0 runs 1F2.",
    "Both ranks start at tick 0. By symmetry each rank runs the other's row with the microbatches exchanged.",
)  # fmt: skip
turn = _puzzle(
    challenges.TURN, 25, 3,
    "Rank 1 waits for two stages before its first forward. Which stages should it have so that it waits for one?",
    "In a V rank 0 has stages 0 and 3, rank 1 has 1 and 2: the last forward and the first backward are on one rank.",
    "Then split the backwards.",
)  # fmt: skip
links = _puzzle(
    challenges.LINKS, 20, 2,
    "A microbatch is away for longer than without flights, so more of them have to be on their way.",
    "More forwards before the first backward: rank 0 runs five of them. For less memory split the backwards as well.",
)  # fmt: skip
dualpipe = _puzzle(
    challenges.DUALPIPE, 40, 4,
    "With one copy in 4 stages no schedule is quicker than 27 of DualPipe's ticks: rank 3 waits for three forwards. "
    "How long does it wait for half stages in a V?",
    "Rank r has the stages r and 7 - r. All work of a rank takes 48 ticks, and rank 3 starts at tick 3.",
    "This is ZBV: see V-shapes.",
)  # fmt: skip
