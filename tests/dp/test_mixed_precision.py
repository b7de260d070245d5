"""Loss scaling against torch step by step; what all ranks decide by it is in `test_one_decision.py`."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dualpipe_lab.dp.mixed_precision import LossScaler


@settings(max_examples=30)
@given(
    st.lists(st.booleans(), min_size=1, max_size=30),
    st.integers(1, 4),
    st.sampled_from([2.0**100, 1024.0, 3.0]),
    st.sampled_from([(2.0, 0.5), (4.0, 0.25)]),
)
def test_scales_equal_torch_step_by_step(overflows, interval, scale, factors):
    growth, backoff = factors
    ours = LossScaler(scale, interval=interval, growth=growth, backoff=backoff)
    theirs = torch.amp.GradScaler(
        "cpu", init_scale=scale, growth_interval=interval, growth_factor=growth, backoff_factor=backoff
    )
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], 0.1)
    for overflow in overflows:
        weight.grad = None
        theirs.scale(weight.sum()).backward()
        weight.grad.fill_(float("inf") if overflow else 1.0)
        theirs.step(optimizer)
        theirs.update()
        ours.update(overflow)
        assert ours.scale == theirs.get_scale()
        assert ours.num_good_steps == theirs.state_dict()["_growth_tracker"]
    again = LossScaler()
    again.load_state_dict(json.loads(json.dumps(ours.state_dict())))
    assert again.state_dict() == ours.state_dict()


def test_the_scale_never_becomes_infinite():
    scaler = LossScaler(1e308, growth=1e10, interval=1)
    scaler.update(False)
    assert scaler.scale == 1e308


def test_bad_numbers_are_refused():
    with pytest.raises(ValueError, match=r"growth > 1.* got scale=65536.0, growth=0.5"):
        LossScaler(growth=0.5)
