"""What a check says of all orders is true of all orders."""

from itertools import product

from dualpipe_course.pp.gpipe import MAKESPAN, MEMORY, MICROBATCHES, RANKS

TICKS = {"F": 1, "B": 2}


def can_end(rooms, num_microbatches, limit):
    """Whether any order of F and B ends within `limit` ticks; a state is what each rank has done, and does.

    Microbatches are alike, so that only numbers count: of forwards and backwards that are over, and of ticks that
    the present one still takes.
    """
    states = {((0, 0, "", 0),) * len(rooms)}
    for now in range(limit):
        states = {
            after
            for state in states
            for chosen in product(*(_choices(state, rank, num_microbatches, rooms) for rank in range(len(rooms))))
            if _is_in_time(after := tuple(map(_tick, chosen)), now + 1, num_microbatches, limit)
        }
        if any(backwards == num_microbatches for state in states for _, backwards, _, _ in state[:1]):
            return True
    return False


def _choices(state, rank, num_microbatches, rooms):
    forwards, backwards, _, left = state[rank]
    if left:
        return [state[rank]]
    choices = [(forwards, backwards, "", 0)]
    if (
        forwards < num_microbatches
        and forwards - backwards < rooms[rank]
        and (rank == 0 or state[rank - 1][0] > forwards)
    ):
        choices.append((forwards, backwards, "F", TICKS["F"]))
    last = rank == len(state) - 1
    if backwards < forwards and (last or state[rank + 1][1] > backwards):
        choices.append((forwards, backwards, "B", TICKS["B"]))
    return choices


def _tick(cell):
    forwards, backwards, kind, left = cell
    if left != 1:
        return forwards, backwards, kind, max(0, left - 1)
    return forwards + (kind == "F"), backwards + (kind == "B"), "", 0


def _is_in_time(state, now, num_microbatches, limit):
    """After a rank's last backward each rank above has one more."""
    for rank, (forwards, backwards, kind, left) in enumerate(state):
        work = num_microbatches - forwards + 2 * (num_microbatches - backwards) - (TICKS[kind] - left if kind else 0)
        if work and now + work + 2 * rank > limit:
            return False
    return True


def test_no_order_with_room_for_three_is_quicker():
    size = ([MEMORY] * RANKS, MICROBATCHES)
    assert can_end(*size, MAKESPAN)
    assert not can_end(*size, MAKESPAN - 1)


def test_the_search_finds_what_is_known():
    """GPipe's and 1F1B's 33 ticks with room for all and for four, and no fewer."""
    assert [can_end([4] * 4, 8, limit) for limit in (32, 33)] == [False, True]
    assert [can_end([2] * 2, 2, limit) for limit in (8, 9)] == [False, True]
