"""What the schedule studio asks of Python: verdicts, moves that mend, numbers, waits, exports; and its challenges.

Chapter: book/pp/studio.  In, out: JSON text, so that one function answers a notebook from its kernel and a published
page from the Python that its build put beside it.  A question is {"ask": name, ...}, with the program as rows of text:
  verdict   problems, the smallest circle of waits, a move that was tried, and the numbers of a program that runs
  why       why a step does not start earlier, in one sentence
  write     the program as text, as torch's CSV, as a script, or as a trace for Perfetto
  read      a text or a CSV as a program
A ValueError, such as that of a text that is no program, is answered by {"error": its sentence}.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.explain import COOLDOWN, explain
from dualpipe_lab.pp.lowering import strip
from dualpipe_lab.pp.optimise.bounds import lower_bound
from dualpipe_lab.pp.program import Program, actions_of
from dualpipe_lab.pp.simulator import simulate
from dualpipe_lab.pp.torch_csv import from_torch_csv, to_torch_csv
from dualpipe_lab.pp.validation.deadlock import UntimedRun, find_fix
from dualpipe_lab.pp.validation.rules import InvalidProgram, ProblemList, index_actions
from dualpipe_lab.pp.validation.validator import validate
from dualpipe_lab.timeline import Timeline
from dualpipe_lab.timeline.units import number

Answer = dict[str, Any]

MOST_CHARACTERS, MOST_RANKS, MOST_COUNT = 1_000_000, 1024, 4096  # of what a page reads
MOST_MARKED = 64  # steps that problems name
_ACTION = re.compile(r"\d+[FBIW]\d+")
_CELL = re.compile(r"stages? ([\d, ]+).*? microbatch (\d+)")
_IS_CSV = re.compile(r"^[^#\n]*,", re.MULTILINE)
_HEADER = re.compile(r"\s*# (.*): \d+ ranks, \d+ stages, \d+ microbatches")
# no line begins with an import of torch: the build leaves files with one out of the browser's Python
_SCRIPT = """import torch

import dualpipe_lab as lab
from dualpipe_lab import pp

ROWS = [
{rows}
]
steps = pp.Program.parse({name!r}, ROWS).ranks
program = pp.Program({name!r}, steps, {counts})
print(pp.simulate(program, pp.Cost({costs})))


def train(rank, world_size):
    torch.manual_seed(0)  # the same model and data on every rank
    model = [torch.nn.Linear(8, 8).double() for _ in range(program.num_stages)]
    inputs, targets = torch.randn(2, program.num_microbatches, 4, 8, dtype=torch.float64)
    mine = {{action.stage: model[action.stage] for action in program.actions(rank)}}
    runtime = lab.PipelineRuntime(program, mine, torch.nn.functional.mse_loss, sum_copies=True)
    result = runtime.step(list(inputs), list(targets))
    return {{microbatch: float(loss) for microbatch, loss in result.losses.items()}}


if __name__ == "__main__":
    print(lab.launch(train, program.num_ranks))  # the losses by microbatch, on the ranks that have them
"""


@dataclass(frozen=True)
class Challenge:
    """A puzzle of the studio: a program to write under rules, with a bound on its time and two stars.

    Solved is a valid program within all rules: stages and microbatches as given, at most `in_flight` activations on any
    rank, no more than `directions` routes, at most `goal` ticks.  One star for at most `best` ticks, one for at most
    `least` activations on the fullest rank.

    Attributes:
        name: a short name, such as "mend".
        title: what to do, in a few words.
        text: the task, as the page shows it.
        ranks, stages, microbatches: its size.
        start: one row of text per rank to begin with; empty rows to begin with nothing.
        costs: ticks by the names of `Cost`.
        directions: 1 for every stage on one rank, 2 for two copies of the weights.
        in_flight: the limit of activations on each rank; None for no limit.
        goal: the most ticks that solve it; None for any.
        best: the most ticks for the star of time.
        least: the most activations on a rank for the star of memory.
        bound: ticks that no order under these rules can be below.
    """

    name: str
    title: str
    text: str
    ranks: int
    stages: int
    microbatches: int
    start: tuple[str, ...]
    best: int
    least: int
    bound: int
    goal: int | None = None
    in_flight: int | None = None
    directions: int = 1
    costs: tuple[tuple[str, Any], ...] = ()

    @property
    def cost(self) -> Cost:
        """The costs of its actions and links."""
        return Cost(**dict(self.costs))

    def program(self, rows: Sequence[str]) -> Program:
        """Return rows of text as a program of this size; ValueError for text that is not one."""
        ranks = Program.parse(self.name, rows).ranks
        return Program(self.name, ranks, self.stages, self.microbatches, self.directions)

    def stars(self, timeline: Timeline) -> dict[str, bool]:
        """Return which of the stars "time" and "memory" a run earns; ValueError for one that breaks a rule."""
        held = max(map(timeline.peak_activations, range(timeline.num_ranks)))
        if self.in_flight is not None and held > self.in_flight:
            raise ValueError(f"a rank holds {held} activations, {self.in_flight} are allowed")
        if self.goal is not None and timeline.makespan > self.goal:
            raise ValueError(f"it takes {timeline.makespan} ticks, at most {self.goal} are allowed")
        return {"time": timeline.makespan <= self.best, "memory": held <= self.least}

    @property
    def spec(self) -> Answer:
        """The challenge as the element <dp-studio> reads it."""
        return asdict(self) | {"start": list(self.start), "costs": self.cost.to_dict(self.stages)}


def answer(question: str) -> str:
    r"""Answer a question of the page.

    >>> answer('{"ask": "read", "text": "0F0,0B0"}')
    '{"program": {"name": "CSV", "rows": ["0F0 0B0"], "stages": 1, "microbatches": 1, "directions": 1}, "left_out": 0}'
    >>> answer('{"ask": "read", "text": "0G0"}')[:54]
    '{"error": "rank 0, position 0: \'0G0\' is not an action;'
    """
    asked = json.loads(question)
    try:
        return json.dumps(_ANSWERS[asked.pop("ask")](**asked))
    except ValueError as refused:
        return json.dumps({"error": str(refused)})


def as_json(program: Program) -> Answer:
    """Return a program as questions and answers have it."""
    counts = {"stages": program.num_stages, "microbatches": program.num_microbatches}
    return {"name": program.name, "rows": program.rows(), **counts, "directions": program.num_directions}


def verdict(program: Answer, costs: Answer, limit: int | None = None, challenge: Answer | None = None) -> Answer:
    """Return what the validator, the simulator and the bound say about a program, and about a challenge's answer.

    `figures` is None for a program that cannot run; one without enough room for its activations has them.
    """
    order, figures, problems = _program(program), None, InvalidProgram("", (), 0)
    try:
        figures = _figures(order, Cost(**costs), limit)
        validate(order, in_flight=limit)
    except InvalidProgram as refused:
        problems = refused
    found: Answer = {"problems": list(problems.problems), "figures": figures, "says": _sentence(figures, problems)}
    found |= {"marks": _places(order, problems.problems), "circle": [], "fix": None}
    if any(problem.startswith("deadlock") for problem in problems.problems):
        found |= _way_out(order)
    return found if challenge is None else found | {"challenge": judged(challenge, program)}


def why(program: Answer, costs: Answer, rank: int, position: int) -> Answer:
    """Return why a step starts when it does."""
    told = explain(_program(program), Cost(**costs))
    if told.timeline is None:
        raise ValueError("only a schedule that can run has times to explain; mend it first")
    spans = told.timeline.spans_by_rank[rank]
    span = spans[position]
    head = f"{span.label} starts at {number(span.start)}"
    for pause in told.pauses:
        if (pause.rank, pause.end) == (rank, span.start) and pause.phase != COOLDOWN and pause.beside == span.label:
            return {"says": f"{head}: {pause}"}
    if position == 0:
        return {"says": f"{head}: it is the first step of rank {rank} and waits for nothing"}
    return {"says": f"{head}: rank {rank} is busy with {spans[position - 1].label} until then"}


def write(form: str, program: Answer, costs: Answer) -> Answer:
    """Return the program in one of the forms "text", "csv", "comms", "python" and "trace"."""
    order, cost = _program(program), Cost(**costs)
    if form == "text":
        return {"text": str(order)}
    if form == "trace":
        return {"text": simulate(order, cost).to_perfetto()}
    if form == "python":
        return {"text": _script(order, costs)}
    return {"text": to_torch_csv(order, "compute_only" if form == "csv" else "compute_comms")}


def read(text: str) -> Answer:
    """Return the program of a text or a CSV without its sends and receives, and how many were left out."""
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"the text has {len(text)} characters; the studio reads at most {MOST_CHARACTERS}")
    header = _HEADER.match(text)
    name = header[1] if header else "schedule"
    order = from_torch_csv(text, check=False) if _IS_CSV.search(text) else Program.parse(name, text)
    if order.num_ranks > MOST_RANKS or max(order.num_stages, order.num_microbatches) > MOST_COUNT:
        most = f"{MOST_RANKS} ranks, {MOST_COUNT} stages and {MOST_COUNT} microbatches"
        raise ValueError(f"the studio reads at most {most}")
    plain = strip(order)
    left_out = sum(map(len, order.ranks)) - sum(map(len, plain.ranks))
    counts = {"stages": order.num_stages, "microbatches": order.num_microbatches}  # those of its messages, too
    return {"program": as_json(plain) | counts, "left_out": left_out}


def judged(challenge: Answer, program: Answer) -> Answer:
    """Return whether a program solves a challenge, its stars, and both in words."""
    given = Challenge(**{**challenge, "costs": tuple(challenge["costs"].items())})
    try:
        if len(program["rows"]) != given.ranks:
            raise ValueError(f"it has {len(program['rows'])} ranks, the challenge has {given.ranks}")
        stars = given.stars(simulate(given.program(program["rows"]), given.cost))
    except InvalidProgram as refused:
        return {"stars": {}, "says": f"Not yet: {refused.problems[0].splitlines()[0]}."}
    except ValueError as refused:
        return {"stars": {}, "says": f"Not yet: {refused}."}
    won = " and of ".join(name for name, has in stars.items() if has)
    says = f"Solved, with the star of {won}." if won else "Solved. The stars of time and of memory are still open."
    return {"stars": {"solved": True, **stars}, "says": says}


_ANSWERS: dict[str, Callable[..., Answer]] = {"verdict": verdict, "why": why, "write": write, "read": read}


def _program(given: Answer) -> Program:
    ranks = Program.parse(given["name"], given["rows"]).ranks
    return Program(given["name"], ranks, given["stages"], given["microbatches"], given["directions"])


def _figures(program: Program, cost: Cost, limit: int | None) -> Answer:
    timeline, ranks = simulate(program, cost), range(program.num_ranks)
    return {
        "makespan": timeline.makespan,
        "bound": lower_bound(program, cost, limit).ticks,
        "bubble": timeline.bubble_fraction,
        "busy": [timeline.busy_time(rank) for rank in ranks],
        "peak": [timeline.peak_activations(rank) for rank in ranks],
        "pending": [timeline.peak_pending_weight_grads(rank) for rank in ranks],
        "stored": max(len(program.stages_of(rank)) for rank in ranks),
        "messages": len(timeline.messages),
    }


def _sentence(figures: Answer | None, problems: InvalidProgram) -> str:
    if problems.total or figures is None:
        count = "1 problem" if problems.total == 1 else f"{problems.total} problems"
        return f"{count}: {'it cannot run' if figures is None else 'there is no room for it'}."
    over, held = figures["makespan"] - figures["bound"], max(figures["peak"])
    near = f"{number(over)} above the lower bound" if over else "no order of these stages on these ranks is quicker"
    holds = f"at most {held} live activation{'s' * (held != 1)} on a rank"
    return f"Valid: {number(figures['makespan'])} ticks, {near}; bubble {figures['bubble']:.1%}; {holds}."


def _places(program: Program, problems: Sequence[str]) -> list[list[int]]:
    """Return rank and position of the steps that problems name, by their actions or by stage and microbatch."""
    named: set[str] = set()
    for problem in problems:
        named |= set(_ACTION.findall(problem))
        if cell := _CELL.match(problem):
            named |= {f"{stage}{kind}{cell[2]}" for stage in re.findall(r"\d+", cell[1]) for kind in "FBIW"}
    steps = ((rank, position, step) for rank, row in enumerate(program.ranks) for position, step in enumerate(row))
    found = [[rank, at] for rank, at, step in steps if not named.isdisjoint(map(str, actions_of(step)))]
    return found[:MOST_MARKED]


def _way_out(program: Program) -> Answer:
    """Return the circle of waits of a deadlock as pairs of places, and the move that ends it or is a first one."""
    run = UntimedRun(program, index_actions(program, ProblemList()))
    circle = [[[wait.rank, wait.position], [wait.other, wait.other_position]] for wait in run.cycle()]
    found = find_fix(program, run)
    assert found is not None  # only messages can leave a program without a move
    move, _ = found
    row = move.apply(program).rows()[move.rank]
    return {"circle": circle, "fix": {"says": move.words(program), "rank": move.rank, "row": row}}


def _script(program: Program, costs: Answer) -> str:
    counts = {name: getattr(program, name) for name in ("num_stages", "num_microbatches", "num_directions")}
    return _SCRIPT.format(
        rows="\n".join(f"    {row!r}," for row in program.rows()),
        name=program.name,
        counts=_arguments(counts.items()),
        costs=_arguments((name, value) for name, value in costs.items() if value is not None),
    )


def _arguments(values: Iterable[tuple[str, Any]]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values)
