import gc
import re
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slow_reference import random_cost, random_program, solve

from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.lowering import lower
from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.simulator import simulate


@given(st.randoms(use_true_random=False))
def test_every_time_equals_the_slow_reference(rng):
    program = random_program(rng)
    cost = random_cost(rng, program.num_stages)
    timeline = simulate(program, cost)
    expected = solve(program, cost)
    found = {
        part: (span.start, span.end) for spans in timeline.spans_by_rank for span in spans for part in span.actions
    }
    assert found == expected
    assert simulate(lower(program), cost) == timeline


def test_messages_on_a_link_queue_first_in_first_out():
    timeline = simulate(schedules.gpipe(2, 3), Cost(F=1, B=1, transfer=5, latency=2))
    forward = [m for m in timeline.messages if m.src == 0]
    assert [(m.label, m.sent, m.left, m.arrived) for m in forward] == [
        ("0F0", 1, None, 8),
        ("0F1", 2, 6, 13),
        ("0F2", 3, 11, 18),
    ]


def test_a_pair_releases_its_forward_before_its_backward():
    rows = ["1F0 1F1 (1F2;1B0)OVERLAP_F_B 1B1 1B2", "0F0 2F0 0F1 2B0 0F2 0B0 2F1 2B1 0B1 2F2 2B2 0B2"]
    messages = simulate(Program.parse("two", rows), Cost(transfer=3)).messages
    forward, backward = (message for message in messages if message.label in ("1F2", "1B0"))
    assert (forward.label, backward.label) == ("1F2", "1B0")
    assert backward.left == backward.sent + 3 == forward.sent + 3


REFUSED = [
    (lambda: Cost(F=0.5), "scale all costs to integer ticks"),
    (lambda: Cost(W=[1, 2.0]), "Cost.W must be an exact number, got 2.0"),
    (lambda: Cost(latency=-1), "Cost.latency must not be negative"),
    (lambda: Cost(overlap=2.5), "Cost.overlap must be an exact number"),
    (lambda: Cost(B={0: "1"}), "Cost.B must be an exact number"),
    (lambda: simulate(schedules.gpipe(2, 1), Cost(F=[1, 2, 3])), "Cost.F lists 3 stages, the program has 2"),
    (lambda: simulate(schedules.gpipe(2, 1), Cost(I={0: 1})), "Cost.I has no entry for stage 1"),
    (lambda: simulate(schedules.dualpipev(2, 4), Cost(overlap=lambda pair: 2.5)), "overlap of"),
]


def test_costs_that_are_not_exact_or_do_not_fit_the_stages_are_refused(subtests):
    for call, message in REFUSED:
        with subtests.test(message=message), pytest.raises(ValueError, match=re.escape(message)):
            call()


def test_pure_parts_import_quickly_and_without_torch():
    code = (
        "import sys, time; before = time.process_time(); import dualpipe_lab.pp.simulator; "
        "print(time.process_time() - before); "
        "from dualpipe_lab.cp import closed_forms, layouts; from dualpipe_lab.topology import Topology; "
        "assert not {'torch', 'numpy', 'matplotlib', 'IPython'} & set(sys.modules); "
        "from dualpipe_lab.viz import RankGrid; RankGrid(Topology([('dp', 2)]), 'dp'); "
        "assert 'torch' not in sys.modules"
    )
    seconds = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout) for _ in range(3)
    ]
    assert min(seconds) < 0.3  # 0.1 on a quiet machine


@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
def test_time_grows_linearly_with_the_number_of_actions(name):
    def seconds(num_microbatches):
        before = time.process_time()
        simulate(schedules.build(name, 16, num_microbatches))
        return time.process_time() - before

    gc.collect()
    gc.disable()  # it walks over whatever other tests have left behind, the more often the more is made here
    try:
        most = 20 * min(seconds(128) for _ in range(4))
        # eight times the actions; a quadratic pass would take up to 64 times as long, in each of four attempts
        assert any(seconds(1024) < most for _ in range(4))
    finally:
        gc.enable()
