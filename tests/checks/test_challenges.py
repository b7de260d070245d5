"""The studio's challenges: their bounds hold for every placement of the stages, and their stars can be earned."""

from itertools import product

import pytest
from studio_answers import ANSWERS

from dualpipe_course.pp.challenges import CHALLENGES, DUALPIPE
from dualpipe_course.pp.studio import judge
from dualpipe_course.wrong import Wrong
from dualpipe_lab.pp import Action, Program, lower_bound, simulate
from dualpipe_lab.pp.schedules import dualpipe


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


def test_no_placement_has_a_lower_bound_below_the_stated_one():
    for challenge in CHALLENGES:
        if challenge.directions == 1:
            programs = [serial(challenge, place) for place in placements(challenge)]
            bounds = [lower_bound(program, challenge.cost, challenge.in_flight).ticks for program in programs]
            assert min(bounds) == challenge.bound, challenge.name


def test_a_rank_of_the_last_challenge_with_three_stages_is_above_the_bound():
    assert 3 * 3 * DUALPIPE.microbatches > DUALPIPE.bound


def test_the_last_challenge_beats_dualpipe_in_its_ticks_and_activations():
    run = simulate(dualpipe(4, 8))
    assert 2 * run.makespan > DUALPIPE.goal
    assert 2 * max(map(run.peak_activations, range(4))) == DUALPIPE.in_flight


def test_each_star_can_be_earned_and_the_start_earns_none():
    for challenge in CHALLENGES:
        for star, rows in ANSWERS[challenge.name].items():
            found = judge(challenge, rows)
            assert getattr(found, star), (challenge.name, star)
            assert found.timeline.makespan >= challenge.bound, challenge.name
        with pytest.raises(Wrong):
            judge(challenge, list(challenge.start))


def test_stars_are_not_given_away():
    """No order of the answers is quicker than the star of time, or holds less than the star of memory, asks for."""
    for challenge in CHALLENGES:
        for rows in ANSWERS[challenge.name].values():
            found = judge(challenge, rows)
            held = max(map(found.timeline.peak_activations, range(challenge.ranks)))
            assert found.timeline.makespan >= challenge.best, challenge.name
            assert held >= challenge.least, challenge.name


def test_rows_are_judged_as_the_notebook_gives_them():
    with pytest.raises(Wrong, match="one line of text per rank"):
        judge(CHALLENGES[0], 9)
