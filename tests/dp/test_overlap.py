"""What travels while the work goes on, in model time: exact on every machine."""

import torch
from models import launch
from torch import nn

import dualpipe_lab as lab
from dualpipe_lab.dp.ddp import GradientReducer
from dualpipe_lab.dp.zero3 import Zero3

NUM_UNITS, WIDTH = 4, 100
FORWARD, BACKWARD, MESSAGE = 10, 20, 5  # ms; a message is half of a unit's 40,000 bytes
LINK = lab.Link(gbps=WIDTH * WIDTH * 4 / 2 * 8 / 5e6, latency_ms=0)


class SlowBackward(torch.autograd.Function):
    """The identity, whose backward takes its time."""

    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, grad):
        lab.compute(BACKWARD)
        return grad


class Unit(nn.Linear):
    """A layer whose forward and backward take model time."""

    def forward(self, x):
        lab.compute(FORWARD)
        return SlowBackward.apply(super().forward(x))


def model():
    return nn.Sequential(*[Unit(WIDTH, WIDTH, bias=False) for _ in range(NUM_UNITS)])


def milliseconds(call):
    began = lab.now()
    call()
    return (lab.now() - began) / 1e6


def test_zero_3_shows_one_gather_per_pass_and_the_last_scatter():
    def fn(rank, world_size):
        units = model()
        Zero3(units, units=list(units))
        return milliseconds(lambda: units(torch.ones(1, WIDTH)).sum().backward())

    expected = NUM_UNITS * (FORWARD + BACKWARD) + 3 * MESSAGE
    assert launch(fn, 2, clock="virtual", link=LINK) == [expected] * 2


def test_buckets_show_the_last_sum_alone():
    def fn(rank, world_size, bucket_bytes):
        units = model()
        reducer = GradientReducer(units.parameters(), bucket_bytes=bucket_bytes)

        def step():
            units(torch.ones(1, WIDTH)).sum().backward()
            reducer.finish()

        return milliseconds(step)

    work = NUM_UNITS * (FORWARD + BACKWARD)
    assert launch(fn, 2, 1, clock="virtual", link=LINK) == [work + 2 * MESSAGE] * 2  # an all-reduce is two of them
    whole = work + NUM_UNITS * 2 * MESSAGE  # one bucket: everything travels after the backward
    assert launch(fn, 2, 2**20, clock="virtual", link=LINK) == [whole] * 2
