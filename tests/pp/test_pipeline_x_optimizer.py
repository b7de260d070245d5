"""Every schedule x every optimizer x every kind of stage: gradients and one clipped step beside one process."""

import pytest
from optimizer_runs import DP, MIRRORED, OPTIMIZERS, PP, M, one_process, train

import dualpipe_lab as lab
from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.program import W

LAYERS = ("plain", "custom", "two", "experts")
PROGRAMS = {name: schedules.build(name, PP, M) for name in schedules.names(synchronous=True)}
REFERENCES = {}


def reference(layers, number):
    """What one process makes of `number` stages."""
    if (layers, number) not in REFERENCES:
        (REFERENCES[layers, number],) = lab.launch(one_process, 1, layers, number, output="collect")
    return REFERENCES[layers, number]


def refused(kind, name):
    """The rule that forbids a combination, or None."""
    if kind != "fsdp2":
        return None
    is_split = any(action.kind == W for rank in range(PP) for action in PROGRAMS[name].actions(rank))
    return "before W has made them" if is_split else "shards what mirrors add" if name in MIRRORED else None


def error(ours, theirs, shards):
    """The largest difference of two sets of tensors, in units of max(1, largest entry): at most 1e-12."""
    worst = 0.0
    for key, value in ours.items():
        expected = shards[key].of(theirs[key]) if key in shards else theirs[key]
        assert value.shape == expected.shape, key
        worst = max(worst, float((value - expected).abs().max() / max(1.0, float(expected.abs().max()))))
    return worst


def compare(kind, layers, programs, joint=True):
    """The worst error of all programs."""
    numbers = {program.num_stages for program in programs.values()}
    weights = {number: reference(layers, number)[0] for number in numbers}
    out = lab.launch(train, PP * DP, kind, layers, programs, weights, joint, output="collect", timeout=400)
    worst = 0.0
    for name, ranks in zip(programs, zip(*out, strict=True), strict=True):
        rule, (_, grads, after, norm) = refused(kind, name), reference(layers, programs[name].num_stages)
        for found in ranks:
            if rule is not None:
                assert isinstance(found, str), (name, "not refused")
                assert rule in found, name
                assert "; use " in found, name
                continue
            assert not isinstance(found, str), (name, found)
            shards, ours, our_norm, weights_after = found
            errors = error(ours, grads, shards), abs(our_norm / norm - 1), error(weights_after, after, shards)
            assert max(errors) <= 1e-12, (name, errors)
            worst = max(worst, *errors)
        assert rule or set().union(*(found[1] for found in ranks)) == set(grads), name
    return worst


FSDP2 = pytest.param("fsdp2", marks=pytest.mark.on_gloo("torch's fully_shard asks for CUDA itself, which is not there"))


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("kind", [*OPTIMIZERS, FSDP2])
def test_gradients_and_a_clipped_step_are_those_of_one_process(kind, layers):
    """Of loops, V shapes and both directions one optimizer holds the two stages of a rank."""
    print(f"{kind} x {layers}: {compare(kind, layers, PROGRAMS):.1e}")


@pytest.mark.parametrize("layers", ["custom", "experts"])
@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_an_optimizer_for_each_stage_takes_the_norm_of_both(kind, layers):
    several = {name: program for name, program in PROGRAMS.items() if program.num_stages > PP or name in MIRRORED}
    assert len(several) >= 7
    print(f"{kind} for each stage x {layers}: {compare(kind, layers, several, joint=False):.1e}")
