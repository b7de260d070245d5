"""The moments that can be a rank's peak, beside a walk through all of its actions."""

import random
from collections import Counter

import pytest

from dualpipe_lab.plan import Plan
from dualpipe_lab.plan.memory import kept_counts
from dualpipe_lab.pp import schedules


def walk(plan, pp_rank, kept_bytes, working):
    """The first of the largest peaks: bytes of the kept activations and of the action."""
    kept, best = Counter(), (-1, None)
    for action in plan.program.actions(pp_rank):
        kept[action.stage] += action.kind == "F"
        total = sum(count * kept_bytes[stage] for stage, count in kept.items()) + working[action.stage, action.kind]
        best = max(best, (total, str(action)), key=lambda one: one[0])
        kept[action.stage] -= action.kind in ("B", "W")
    return best


@pytest.mark.parametrize("name", schedules.names(synchronous=True))
@pytest.mark.parametrize(("pp", "num_microbatches"), [(2, 4), (4, 8), (4, 16)])
def test_the_peak_is_among_the_moments_whatever_a_stage_weighs(name, pp, num_microbatches):
    plan, draw = Plan(pp=pp, schedule=name, num_microbatches=num_microbatches), random.Random(pp)
    for pp_rank in range(pp):
        moments = kept_counts(plan, pp_rank)
        assert len(moments) < len(list(plan.program.actions(pp_rank)))
        for _ in range(20):
            stages = range(plan.num_stages)
            kept_bytes = {stage: draw.randrange(1, 100) for stage in stages}
            working = {(stage, kind): draw.randrange(0, 300) for stage in stages for kind in "FBIW"}
            found = (-1, None)
            for action, kept in moments:
                total = sum(count * kept_bytes[stage] for stage, count in kept) + working[action.stage, action.kind]
                found = max(found, (total, str(action)), key=lambda one: one[0])
            assert found == walk(plan, pp_rank, kept_bytes, working)
