"""PipeDream: 1F1B without a flush; a stage updates its weights after the backward of every minibatch.

Chapter: book/pp/pipedream.  In: P ranks, M minibatches of a run.  Out: one list of actions per rank; stage = rank.
A stage's version is the number of its updates so far.  F and B of a minibatch must use one version; otherwise the
result is the gradient of no function.  Weight stashing, vertical sync and 2BW are three rules that choose it.
F and B of a minibatch use weights that are P - 1 - stage updates old.  So `names(synchronous=True)` leaves PipeDream
out, and its numbers must not be ranked beside those of schedules that compute the batch's gradient.
Elsewhere: msr-fiddle/pipedream (2019); Megatron's 1F1B is called PipeDream-flush because of its ancestor.
Sources: Harlap et al. 2018 (arXiv 1806.03377), section 3; Narayanan et al. 2019 (SOSP), section 3; Narayanan et al.
2021 (arXiv 2006.09503), section 3, which asks for batches of at least P microbatches.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from dualpipe_lab.pp.program import Action, B, F, Program, W, check_counts
from dualpipe_lab.pp.schedules.flush import num_messages, one_f_one_b
from dualpipe_lab.pp.schedules.schedule import Schedule


def pipedream(num_ranks: int, num_microbatches: int) -> Program:
    """Build a run of PipeDream; `num_microbatches` is its number of minibatches, each with an update.

    It is 1F1B with updates in between.  The pipeline fills and drains once per run, not once per batch.

    >>> " ".join(map(str, pipedream(2, 3).ranks[0]))
    '0F0 0F1 0B0 0F2 0B1 0B2'
    """
    check_counts("pipedream", num_ranks=num_ranks, num_microbatches=num_microbatches)
    order = one_f_one_b(num_ranks, num_microbatches).ranks
    return Program("PipeDream (async)", order, num_ranks, num_microbatches, num_directions=1)


def updates_before(program: Program, update_every: int = 1) -> list[list[int]]:
    """Return, as [stage][microbatch], the number of the stage's updates when F of the microbatch starts.

    These are the versions under weight stashing: max(0, j - (P - 1 - s)) for minibatch j on stage s of PipeDream, which
    keeps P - s versions in a long run.

    `update_every`: the number of a stage's backwards per update.
    Raises ValueError for a program that places a stage on two ranks: the copies would differ after one update.

    >>> from dualpipe_lab.pp.schedules import pipedream
    >>> updates_before(pipedream(3, 5))
    [[0, 0, 0, 1, 2], [0, 0, 1, 2, 3], [0, 1, 2, 3, 4]]
    """
    found = [[0] * program.num_microbatches for _ in range(program.num_stages)]
    for stage, actions in enumerate(_by_stage(program)):
        num_backwards = 0
        for action in actions:
            if action.kind == F:
                found[stage][action.microbatch] = num_backwards // update_every
            num_backwards += action.kind in (B, W)
    return found


def vertical_sync(versions: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the versions under vertical sync: each microbatch uses stage 0's version on every stage.

    In PipeDream these are max(0, j - (P - 1)) for minibatch j; every stage keeps P versions in a long run.

    >>> from dualpipe_lab.pp.schedules import pipedream
    >>> vertical_sync(updates_before(pipedream(3, 5)))
    [[0, 0, 0, 1, 2], [0, 0, 0, 1, 2], [0, 0, 0, 1, 2]]
    """
    return [list(versions[0]) for _ in versions]


def double_buffered(versions: Sequence[Sequence[int]], update_every: int) -> list[list[int]]:
    """Return the versions under 2BW: a batch of `update_every` microbatches uses one version that every stage has.

    In PipeDream on P > 1 ranks these are max(0, t - 1) in batch t, and every stage keeps 2 versions, if batches have at
    least P - 1 microbatches.

    >>> from dualpipe_lab.pp.schedules import pipedream
    >>> double_buffered(updates_before(pipedream(3, 6), update_every=3), update_every=3)[0]
    [0, 0, 0, 0, 0, 0]
    """
    num_microbatches = len(versions[0])
    newest = [
        min(version for row in versions for version in row[start : start + update_every])
        for start in range(0, num_microbatches, update_every)
    ]
    return [[newest[m // update_every] for m in range(num_microbatches)] for _ in versions]


def versions_kept(program: Program, versions: Sequence[Sequence[int]], update_every: int = 1) -> list[int]:
    """Return the most versions of its weights that each stage holds, the current version included.

    A version is held while it is current, and until the last backward that needs it.  It is dropped before the update
    after this backward writes the next version.

    >>> from dualpipe_lab.pp.schedules import pipedream
    >>> program = pipedream(3, 8)
    >>> versions_kept(program, updates_before(program))
    [3, 2, 1]
    """
    return [_most_held(actions, versions[stage], update_every) for stage, actions in enumerate(_by_stage(program))]


def _most_held(actions: Sequence[Action], versions: Sequence[int], update_every: int) -> int:
    backwards = [(time, action.microbatch) for time, action in enumerate(actions) if action.kind in (B, W)]
    updates = [time for time, _ in backwards[update_every - 1 :: update_every]]
    needed: dict[int, int] = {}  # version -> the last time at which a backward needs it
    for time, microbatch in backwards:
        needed[versions[microbatch]] = time
    changes = []
    for version, (made, replaced) in enumerate(pairwise([-1, *updates, len(actions)])):
        changes += [(made, 1), (max(replaced, needed.get(version, -1)), -1)]
    return max(accumulate(change for _, change in sorted(changes)))  # at one time, what is dropped goes first


def _by_stage(program: Program) -> list[list[Action]]:
    stages: list[list[Action]] = [[] for _ in range(program.num_stages)]
    home: dict[int, int] = {}
    for rank in range(program.num_ranks):
        for action in program.actions(rank):
            if home.setdefault(action.stage, rank) != rank:
                raise ValueError(
                    f"stage {action.stage} of {program.name} is on ranks {home[action.stage]} and {rank}; its copies "
                    "would part with their first updates: use a program that keeps each stage on one rank"
                )
            stages[action.stage].append(action)
    return stages


SCHEDULES = (Schedule("pipedream", pipedream, messages=num_messages, is_synchronous=False),)
