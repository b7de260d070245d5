"""The timeline of a run has a span for each module's forward, inside of the action that runs it; or none."""

import json
from collections import Counter

from training_runs import LLAMA, V3, plan, run

from dualpipe_lab.timeline.spans import MODULES, WORK


def spans(result, stream):
    return [span for rank in range(result.timeline.num_ranks) for span in result.timeline.stream(rank, stream)]


def names(numbers, parts):
    return [f"layers.{number}{part}" for number in numbers for part in parts]


def test_each_module_is_inside_of_its_action():
    """Stages 0 and 1 of a V3 with a dense first layer, 2 microbatches; the second rank has the head."""
    result = run(V3, plan(pp=2, num_microbatches=2), steps=2, module_spans=True)
    found = spans(result, MODULES)
    sparse = ("", ".attention", ".mlp.router", ".mlp.experts", ".mlp.shared")
    expected = [*names([0], ("", ".attention", ".mlp")), *names(range(1, V3.num_layers), sparse)]
    expected += ["embedding", "norm", "head"]
    assert Counter(span.label for span in found) == Counter(dict.fromkeys(expected, 2))
    actions = {(span.stage, span.microbatch): span for span in spans(result, WORK) if span.kind == "F"}
    outer = {(span.label, span.microbatch): span for span in found}
    for span in found:
        around = [actions[span.stage, span.microbatch]]
        if span.label.count(".") > 1:
            around.append(outer[".".join(span.label.split(".")[:2]), span.microbatch])
        assert all(each.start <= span.start < span.end <= each.end for each in around), span
    check_trace(result.timeline, found)


def check_trace(timeline, found):
    """In the Chrome trace the modules are slices on the thread of the actions, which contain them."""
    events = [event for event in json.loads(timeline.to_perfetto())["traceEvents"] if event["ph"] == "X"]
    modules = [event for event in events if event["cat"] == "module"]
    assert len(modules) == len(found)
    assert {event["tid"] for event in modules} == {0}
    for event in modules:
        around = [each for each in events if each["cat"] == "F" and each["args"] == event["args"]]
        (action,) = [each for each in around if each["pid"] == event["pid"]]
        assert action["ts"] <= event["ts"]
        assert event["ts"] + event["dur"] <= action["ts"] + action["dur"] + 1e-6


def test_recomputed_modules_are_inside_of_the_backward_and_none_are_there_without_the_option():
    chosen = plan(dp=2, num_microbatches=2, recompute=True)
    found = run(LLAMA, chosen, steps=1, module_spans=True)
    layers = [span for span in spans(found, MODULES) if span.label == "layers.1.attention"]
    assert len(layers) == 2 * 2 * 2, "ranks, microbatches, forward and recomputation"
    assert {span.kind for span in spans(found, WORK)} == {"F", "B"}
    without = run(LLAMA, chosen, steps=1)
    assert without.timeline.streams == (WORK,)
    assert without.losses == found.losses
