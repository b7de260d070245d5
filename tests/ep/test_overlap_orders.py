"""Orders on two streams: what is in them, what the host calls, how long they take."""

from functools import partial
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpipe_lab.ep.overlap import (
    InvalidOrder,
    Order,
    backward_alone,
    check_pair,
    forward_alone,
    host_calls,
    input_grads_alone,
    lower_bound,
    one_f_one_b_basic,
    one_f_one_b_overlap,
    parse_ops,
    simulate,
    ticks_of,
    weight_grads_alone,
)
from dualpipe_lab.ep.overlap import closed_forms as forms
from dualpipe_lab.ep.overlap.order import (
    COMM,
    COMPUTE,
    PLAIN,
    ROUTED,
    SHARED,
    ops_of_layers,
)
from dualpipe_lab.ep.overlap.simulator import stream_totals

TICKS = st.fixed_dictionaries({kind: st.integers(0, 9) for kind in (*COMPUTE, *COMM)}).map(lambda t: ticks_of(**t))
LAYERS = st.lists(st.sampled_from([ROUTED, SHARED, PLAIN]), min_size=1, max_size=5)
ROUTED_LAYERS = st.integers(1, 5).map(lambda number: [ROUTED] * number)
PAIRS = st.one_of(  # an order, the layers of its forward and of its backward
    st.one_of(LAYERS, ROUTED_LAYERS).map(lambda layers: (one_f_one_b_basic(layers), layers, layers)),
    st.tuples(st.one_of(LAYERS, ROUTED_LAYERS), st.one_of(LAYERS, ROUTED_LAYERS), st.booleans()).map(
        lambda pair: (one_f_one_b_overlap(pair[0], split=pair[2], backward_layers=pair[1]), *pair[:2])
    ),
)


def test_closed_forms_equal_the_simulation():
    for layers, work, comm in product(range(1, 6), range(5), range(11)):
        ticks = ticks_of(work, comm)

        def time(order, ticks=ticks):
            return simulate(order, ticks).makespan

        size = layers, work, comm
        assert time(one_f_one_b_basic(layers)) == layers * (6 * work + 4 * comm)
        assert time(forward_alone(layers)) == forms.forward_makespan(*size)
        for split in (True, False):
            assert time(one_f_one_b_overlap(layers, split=split)) == forms.overlap_makespan(*size, split)
            assert time(backward_alone(layers, split=split)) == forms.backward_makespan(*size, split)


@settings(max_examples=200)
@given(PAIRS, TICKS)
def test_any_layers_make_a_legal_pair_whose_time_obeys_streams_and_needs(pair, ticks):
    order, up, down = pair
    check_pair(order, up, down)
    streams, times = simulate(order, ticks), slow_times(order, ticks)
    found = {span.label: (span.start, span.end) for span in (*streams.compute, *streams.comm)}
    assert found == {str(op): time for op, time in times.items() if time[0] != time[1]}
    assert lower_bound(order, ticks) <= streams.makespan <= sum(stream_totals(order, ticks))
    assert streams.idle == streams.makespan - stream_totals(order, ticks)[0]
    assert sum(wait for _, wait in streams.waits()) == streams.idle
    if set(up) | set(down) == {PLAIN}:
        serial = simulate(forward_alone(up), ticks).makespan + simulate(backward_alone(down), ticks).makespan
        assert streams.makespan == serial


@settings(max_examples=40)
@given(LAYERS)
def test_halves_alone_have_every_operation_of_any_layers(layers):
    both = input_grads_alone(layers).pieces | weight_grads_alone(layers).pieces
    assert both == backward_alone(layers).pieces == backward_alone(layers, split=False).pieces
    assert both == set(ops_of_layers(layers, False))
    assert forward_alone(layers).pieces == set(ops_of_layers(layers, True))
    for order in (forward_alone(layers), input_grads_alone(layers), weight_grads_alone(layers)):
        host_calls(order)


def test_a_shared_expert_runs_beside_the_dispatch_and_beside_the_gradient_of_combine():
    ticks = ticks_of(2, 2)
    assert simulate(forward_alone([SHARED]), ticks).makespan == simulate(forward_alone([ROUTED]), ticks).makespan
    assert (
        simulate(input_grads_alone([SHARED]), ticks).makespan == simulate(input_grads_alone([ROUTED]), ticks).makespan
    )


def slow_times(order, ticks):
    """When each operation starts and ends, by asking again until nothing changes."""
    makers, times = order.makers(), {}
    while len(times) < len(order.compute) + len(order.comm):
        for row in (order.compute, order.comm):
            for place, op in enumerate(row):
                before = row[place - 1 : place] if place else ()
                before += tuple(makers[other] for other in slow_needs(op, makers) if other in makers)
                if op not in times and all(other in times for other in before):
                    start = max((times[other][1] for other in before), default=0)
                    times[op] = start, start + ticks[op.kind]
    return times


def slow_needs(op, makers):
    """Operands by the layers' data flow: what has the name of an operand and is in the order."""
    layer = op.layer
    if op.kind in ("A_F", "P_F"):
        return [parse_ops(f"{kind}{layer - 1}")[0] for kind in ("C_F", "P_F", "S_F") if layer]
    if op.kind in ("C_B", "S_B", "P_B", "S_BW", "P_BW"):
        return [parse_ops(f"{kind}{layer + 1}")[0] for kind in ("A_B", "P_B")]
    more = parse_ops(f"S_B{layer}") if op.kind in ("A_B", "A_BW") else ()
    return [op.needs, *more]


@given(PAIRS)
def test_the_host_does_each_thing_once_issues_at_once_and_waits_as_late_as_it_can(pair):
    order, makers = pair[0], pair[0].makers()
    calls = host_calls(order)
    for verb, row in (("run", order.compute), ("issue", order.comm), ("wait", order.comm)):
        assert [call.op for call in calls if call.verb == verb] == list(row)
    runs = {op: place for place, (verb, op) in enumerate(calls) if verb == "run"}
    for place, (verb, op) in enumerate(calls):
        if verb == "issue":
            row = order.comm[: order.comm.index(op) + 1]  # it cannot leave before those in front of it
            needs = (makers[need] for other in row for need in slow_needs(other, makers) if need in makers)
            ready = max((runs[need] for need in needs), default=-1)
            assert all(call.verb != "run" for call in calls[ready + 1 : place])
        if verb == "wait" and any(call.verb == "run" for call in calls[place:]):
            following = next(call.op for call in calls[place:] if call.verb == "run")
            needs = [makers[need] for need in slow_needs(following, makers) if need in makers]
            assert order.comm.index(op) <= max(order.comm.index(need) for need in needs if need.is_comm)


def test_text_makes_the_round_trip():
    order = one_f_one_b_overlap(3, split=False)
    rows = (" ".join(map(str, row)) for row in (order.compute, order.comm))
    assert Order.parse(order.name, *rows, 1, 0) == order


PAIR = one_f_one_b_overlap(2)
REFUSED = [
    (lambda: parse_ops("A_F0 M_X0"), "position 1: 'M_X0' is not an operation"),
    (lambda: Order.parse("bad", "A_F0 D_F0", ""), "D_F0 runs on the comm stream"),
    (lambda: Order.parse("bad", "A_F0", "M_F0"), "M_F0 runs on the compute stream"),
    (lambda: Order.parse("bad", "A_F0 A_F0", ""), "A_F0 occurs twice"),
    (lambda: Order.parse("bad", "M_BW0 M_W0", ""), "M_W0 occurs twice"),
    (lambda: one_f_one_b_overlap(2, forward=3, backward=3), "microbatch 3 cannot be paired with itself"),
    (lambda: run("M_F0 A_F0", "D_F0 C_F0"), "before M_F0: next on the comm stream is D_F0, which needs A_F0"),
    (lambda: run("A_F0 M_F0", "C_F0 D_F0"), "before M_F0: next on the comm stream is C_F0, which needs M_F0"),
    (lambda: run("M_W0 M_B0", "C_B0"), "M_W0 comes before M_B0"),
    (lambda: run("A_F0 M_F0 A_F1 S_F0", "D_F0 C_F0"), "A_F1 comes before S_F0"),
    (lambda: run("M_B0 A_B0 S_B0", "C_B0 D_B0"), "A_B0 comes before S_B0"),
    (lambda: check_pair(PAIR, 3), "3 layers contains A_F2"),
    (lambda: check_pair(PAIR, 1), "1 layers does not contain A_B1"),
    (lambda: ticks_of(compute=0.5), "whole number or a Fraction"),
    (lambda: ticks_of(comm=-1), "whole number or a Fraction"),
    (lambda: ticks_of(X_F=1), "no operation"),
]
BUILDERS = (one_f_one_b_basic, one_f_one_b_overlap, forward_alone, backward_alone)
LAYERS_REFUSED = [(bad, "whole number of layers") for bad in (0, -1, True, 1.5)]
LAYERS_REFUSED += [(bad, "one layer or more, each ADMC, ASDMC or P") for bad in ([], ["ADM"], ["P", "X"])]


def run(compute, comm):
    return host_calls(Order.parse("stuck", compute, comm))


def test_what_is_no_order_is_refused(subtests):
    layers = [(partial(build, bad), message) for build in BUILDERS for bad, message in LAYERS_REFUSED]
    for call, message in REFUSED + layers:
        with subtests.test(message=message), pytest.raises(ValueError, match=message):
            call()
    assert issubclass(InvalidOrder, ValueError)


@settings(max_examples=30)
@given(TICKS, st.integers(1, 4))
def test_a_timeline_has_both_rows(ticks, layers):
    streams = simulate(one_f_one_b_overlap(layers), ticks)
    timeline = streams.timeline("pair")
    assert timeline.makespan == streams.makespan
    assert (timeline.stream(0), timeline.stream(0, "communication")) == (streams.compute, streams.comm)
    assert timeline.bubble_time(0) == streams.idle
