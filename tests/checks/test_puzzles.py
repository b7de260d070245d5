"""What a check says of all orders is true of all orders."""

from itertools import product

from dualpipe_course.pp import one_f_one_b
from dualpipe_course.pp.gpipe import MAKESPAN, MEMORY, MICROBATCHES, RANKS

TICKS = {"F": 1, "B": 2}


def can_end(rooms, num_microbatches, limit, latency=0):
    """Whether any order of F and B ends within `limit` ticks; a state is what each rank has done, and does.

    Microbatches are alike, so that only numbers count: of forwards and backwards that are over, and of ticks that
    the present one still takes.  Beside it stands the state whose messages have arrived; `latency` is 0 or 1 tick.
    """
    start = ((0, 0, "", 0),) * len(rooms)
    states = {(start, start)}
    for now in range(limit):
        states = {
            (after, state if latency else after)
            for state, known in states
            for chosen in product(
                *(_choices(state, known, rank, num_microbatches, rooms) for rank in range(len(rooms)))
            )
            if _is_in_time(after := tuple(map(_tick, chosen)), now + 1, num_microbatches, limit, latency)
        }
        if any(backwards == num_microbatches for state, _ in states for _, backwards, _, _ in state[:1]):
            return True
    return False


def _choices(state, known, rank, num_microbatches, rooms):
    forwards, backwards, _, left = state[rank]
    if left:
        return [state[rank]]
    choices = [(forwards, backwards, "", 0)]
    if (
        forwards < num_microbatches
        and forwards - backwards < rooms[rank]
        and (rank == 0 or known[rank - 1][0] > forwards)
    ):
        choices.append((forwards, backwards, "F", TICKS["F"]))
    last = rank == len(state) - 1
    if backwards < forwards and (last or known[rank + 1][1] > backwards):
        choices.append((forwards, backwards, "B", TICKS["B"]))
    return choices


def _tick(cell):
    forwards, backwards, kind, left = cell
    if left != 1:
        return forwards, backwards, kind, max(0, left - 1)
    return forwards + (kind == "F"), backwards + (kind == "B"), "", 0


def _is_in_time(state, now, num_microbatches, limit, latency):
    """After a rank's last backward each rank above has one more, and a message in between."""
    for rank, (forwards, backwards, kind, left) in enumerate(state):
        work = num_microbatches - forwards + 2 * (num_microbatches - backwards) - (TICKS[kind] - left if kind else 0)
        if work and now + work + (2 + latency) * rank > limit:
            return False
    return True


def test_no_order_with_room_for_three_is_quicker():
    size = ([MEMORY] * RANKS, MICROBATCHES)
    assert can_end(*size, MAKESPAN)
    assert not can_end(*size, MAKESPAN - 1)


def test_no_order_with_twelve_activations_is_as_quick_over_slow_links():
    """A rank holds no microbatch that the rank above has given back, so that rooms never grow."""
    size = {"num_microbatches": one_f_one_b.MICROBATCHES, "limit": one_f_one_b.BUDGET, "latency": 1}
    assert can_end((5, 4, 2, 1), **size | {"limit": one_f_one_b.BUDGET + 1})
    falling = [rooms for rooms in product(range(1, 10), repeat=one_f_one_b.RANKS) if [*rooms] == sorted(rooms)[::-1]]
    assert not [rooms for rooms in falling if sum(rooms) == one_f_one_b.ROOM - 1 and can_end(rooms, **size)]


def test_the_search_finds_what_is_known():
    """GPipe's and 1F1B's 33 ticks with room for all and for four, and no fewer."""
    assert [can_end([4] * 4, 8, limit) for limit in (32, 33)] == [False, True]
    assert [can_end([2] * 2, 2, limit) for limit in (8, 9)] == [False, True]
