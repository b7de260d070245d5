"""The studio's challenges: their bounds hold for every placement of the stages, and their stars can be earned."""

import sys
from itertools import product
from pathlib import Path

import pytest

from dualpipe_course.exercise import Wrong
from dualpipe_course.pp.challenges import CHALLENGES, DUALPIPE
from dualpipe_course.pp.studio import judge
from dualpipe_lab.pp import Action, Program, lower_bound, simulate
from dualpipe_lab.pp.schedules import dualpipe

sys.path.append(str(Path(__file__).parents[1] / "viz"))
from studio_answers import ANSWERS

BY_NAME = pytest.mark.parametrize("challenge", CHALLENGES, ids=[one.name for one in CHALLENGES])
ONE_COPY = [one for one in CHALLENGES if one.directions == 1]


def serial(challenge, place):
    """One microbatch after the other, with the stages on the given ranks: bounds ask only for the placement."""
    rows = [[] for _ in range(challenge.ranks)]
    for microbatch in range(challenge.microbatches):
        for stage in range(challenge.stages):
            rows[place[stage]].append(Action(stage, "F", microbatch))
        for stage in reversed(range(challenge.stages)):
            rows[place[stage]].append(Action(stage, "B", microbatch))
    return Program("serial", rows, challenge.stages, challenge.microbatches, 1)


def placements(challenge):
    """All of them, or where they are many those with equally many stages on each rank, up to the names of ranks.

    A rank with more stages works longer than the bound.
    """
    ranks, each = range(challenge.ranks), challenge.stages // challenge.ranks
    for place in product(ranks, repeat=challenge.stages):
        is_even = all(place.count(rank) == each for rank in ranks) and list(dict.fromkeys(place)) == list(ranks)
        if is_even or challenge is not DUALPIPE:
            yield place


@pytest.mark.parametrize("challenge", ONE_COPY, ids=[one.name for one in ONE_COPY])
def test_no_placement_has_a_lower_bound_below_the_stated_one(challenge):
    limit = challenge.in_flight
    bounds = [lower_bound(serial(challenge, place), challenge.cost, limit).ticks for place in placements(challenge)]
    assert min(bounds) == challenge.bound


def test_a_rank_of_the_last_challenge_with_three_stages_is_above_the_bound():
    assert 3 * 3 * DUALPIPE.microbatches > DUALPIPE.bound


def test_the_last_challenge_beats_dualpipe_in_its_ticks_and_activations():
    run = simulate(dualpipe(4, 8))
    assert 2 * run.makespan > DUALPIPE.goal
    assert 2 * max(map(run.peak_activations, range(4))) == DUALPIPE.in_flight


@BY_NAME
def test_each_star_can_be_earned_and_the_start_earns_none(challenge):
    for star, rows in ANSWERS[challenge.name].items():
        found = judge(challenge, rows)
        assert getattr(found, star)
        assert found.timeline.makespan >= challenge.bound
    with pytest.raises(Wrong):
        judge(challenge, list(challenge.start))


@BY_NAME
def test_stars_are_not_given_away(challenge):
    """No order of the answers is quicker than the star of time, or holds less than the star of memory, asks for."""
    for rows in ANSWERS[challenge.name].values():
        found = judge(challenge, rows)
        held = max(map(found.timeline.peak_activations, range(challenge.ranks)))
        assert found.timeline.makespan >= challenge.best
        assert held >= challenge.least


def test_rows_are_judged_as_the_notebook_gives_them():
    with pytest.raises(Wrong, match="one line of text per rank"):
        judge(CHALLENGES[0], 9)
