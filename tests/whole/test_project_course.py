"""The project: its page states the budgets of its checks and what the solution takes; misbehaviour gets a verdict."""

import os
import re
from pathlib import Path

import psutil
import pytest

import dualpipe_lab as lab
from dualpipe_course.whole import project, project_parts
from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.simulator import simulate

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "book/whole/project.md").read_text(encoding="utf-8")
SOLUTION = (ROOT / "solutions/whole/project/project.ipynb").read_text(encoding="utf-8")


def rows():
    """The table of budgets: milestone, words, limit, what the solution takes."""
    found = re.findall(r"^\| (\d) \| ([^|]+) \| ([\d,]+) \| ([\d,]+) \|$", PAGE, flags=re.MULTILINE)
    return [(int(number), words, *(int(n.replace(",", "")) for n in both)) for number, words, *both in found]


def test_the_page_has_the_budgets_of_the_checks():
    limits = {(number, words): limit for number, words, limit, _ in rows()}
    for ranks in (2, 3):
        budget = project.optimizer_budget(ranks)
        assert limits[3, f"bytes kept between steps, {ranks} ranks"] == budget["held"]
        assert limits[3, f"bytes sent in a step, {ranks} ranks"] == budget["sent"]
    assert limits[4, "ticks"] == project_parts.TICKS
    assert limits[4, "live activations of a rank"] == project_parts.LIVE
    assert len(limits) == 8


def test_the_solution_takes_what_the_page_says_and_keeps_every_budget():
    """The stored output of the solution is what its checks printed; another test compares it with a new run."""
    for number, _, limit, taken in rows():
        assert taken <= limit
        if number != 1:
            shown = f"{taken:,} of {limit:,}"
            assert re.search(rf"project-{number} solved: [^\"]*\b{shown} ", SOLUTION), shown


def test_no_builder_keeps_the_budgets_of_the_schedule():
    """The puzzle says so, and it would be none if a builder did."""
    for name in schedules.names(synchronous=True):
        try:
            program = schedules.build(name, project_parts.RANKS, project_parts.MICROBATCHES)
        except ValueError:
            continue
        passes = program.num_stages == project_parts.RANKS and project.schedule.verdict(program).passed
        assert not passes, name


def test_the_library_s_search_keeps_them_as_the_page_says():
    from dualpipe_lab.pp import optimise

    first = schedules.build("1f1b", project_parts.RANKS, project_parts.MICROBATCHES)
    found = optimise(first, project_parts.COST, in_flight=project_parts.LIVE).program
    assert isinstance(found, Program)
    assert simulate(found, project_parts.COST).makespan == project_parts.TICKS
    assert project.schedule.verdict(found).passed


class Misbehaving:
    """An optimizer that does something else on its second rank."""

    def __init__(self, weights, group, *numbers):
        from dualpipe_lab import comm

        self.group, self.rank = group, comm.get_rank(group)

    def step(self):
        if self.rank == 1:
            self.misbehave()

    def misbehave(self):
        raise ArithmeticError("lost")


class Exits(Misbehaving):
    def misbehave(self):
        os._exit(3)


class Prints(Misbehaving):
    def misbehave(self):
        print("x" * 3_000_000)


class Waits(Misbehaving):
    def misbehave(self):
        import torch

        from dualpipe_lab import comm

        comm.all_reduce(torch.zeros(1), group=self.group)


@pytest.mark.parametrize(
    ("answer", "says"),
    [(Misbehaving, "lost"), (Exits, "rank 1 "), (Prints, "the vector of weights"), (Waits, "rank 1")],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.on_gloo("the checks start their ranks on GLOO")
def test_a_misbehaving_answer_gets_a_verdict_and_leaves_no_process(answer, says, capfd):
    lab.launch(lambda rank, world_size: None, 1)  # starts the fork server, which stays
    before = set(psutil.Process().children(recursive=True))
    verdict = project.optimizer.verdict(answer)
    assert not verdict.passed
    assert says in verdict.message
    more = set(psutil.Process().children(recursive=True)) - before
    assert psutil.wait_procs(more, timeout=10)[1] == []
