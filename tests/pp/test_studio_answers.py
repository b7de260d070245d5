"""What the studio answers in JSON: the library's own verdicts, numbers, moves, waits, texts and judgements."""

import json

import pytest

from dualpipe_course.pp.challenges import CHALLENGES
from dualpipe_course.pp.studio import judge
from dualpipe_course.wrong import Wrong
from dualpipe_lab import pp
from dualpipe_lab.pp import Cost, Program, schedules
from dualpipe_lab.pp.studio import answer, as_json

UNIT = {"F": 1, "I": 1, "W": 1, "B": None, "overlap": None, "latency": 0, "transfer": 0}


def ask(what, **details):
    return json.loads(answer(json.dumps({"ask": what, **details})))


def verdict(program, limit=None, **costs):
    return ask("verdict", program=as_json(program), costs=UNIT | costs, limit=limit)


def broken(rows, **counts):
    return Program("own", Program.parse("own", rows).ranks, **counts)


def test_what_runs_has_the_numbers_of_the_library():
    for name in schedules.names(synchronous=True):
        program, cost = schedules.build(name, 4, 8), Cost(F=2, latency=1)
        found, timeline = verdict(program, F=2, latency=1), pp.simulate(program, cost)
        figures = found["figures"]
        assert figures["makespan"] == timeline.makespan
        assert figures["bound"] == pp.lower_bound(program, cost).ticks
        assert figures["peak"] == [timeline.peak_activations(rank) for rank in range(4)]
        assert figures["messages"] == len(timeline.messages)
        assert found["says"].startswith(f"Valid: {timeline.makespan} ticks, ")
        assert (found["problems"], found["marks"], found["circle"], found["fix"]) == ([], [], [], None)


BROKEN = {
    "deadlock": broken(["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"]),
    "order, and a microbatch less": broken(["0B0 0F0", "1F0 1B0"], num_microbatches=2),
    "twice": broken(["0F0 0F0 0B0"]),
    "nothing": broken(["", ""], num_stages=2, num_microbatches=1),
    "another route": broken(["0F0 1F1 1B1 0B0", "0F1 1F0 1B0 0B1"], num_directions=1),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_cannot_run_has_its_problems_and_no_numbers(case):
    program = BROKEN[case]
    with pytest.raises(pp.InvalidProgram) as refused:
        pp.validate(program)
    found = verdict(program)
    assert found["problems"] == list(refused.value.problems)
    assert found["figures"] is None
    assert found["says"].endswith("it cannot run.")
    for rank, position in found["marks"]:
        assert program.ranks[rank][position]
    assert bool(found["marks"]) == (case != "nothing")


def test_a_deadlock_has_its_circle_and_a_move_that_ends_it():
    found = verdict(BROKEN["deadlock"])
    assert found["circle"] == [[[0, 1], [1, 2]], [[1, 1], [0, 2]]]
    assert found["fix"]["says"] in found["problems"][0]
    rows = BROKEN["deadlock"].rows()
    rows[found["fix"]["rank"]] = found["fix"]["row"]
    pp.validate(Program.parse("mended", rows))


def test_what_is_out_of_order_comes_before_what_is_missing():
    first, second, *_ = verdict(BROKEN["order, and a microbatch less"])["problems"]
    assert first.startswith("rank 0: 0B0 (position 0) comes before 0F0 (position 1)")
    assert second.startswith("microbatches run from 0 to 1, but no rank runs 1")


def test_too_little_room_is_a_problem_of_an_order_that_runs():
    found = verdict(schedules.build("1f1b", 2, 4), limit=1)
    assert found["says"] == "1 problem: there is no room for it."
    assert found["figures"]["makespan"] == 15
    assert found["marks"] == [[0, 1]]


def test_every_step_has_a_reason_for_its_start():
    program = schedules.build("zbv", 2, 4)
    told = pp.explain(program, Cost(transfer=1))
    pauses = {(pause.rank, pause.end): str(pause) for pause in told.pauses if pause.phase != "cool-down"}
    for rank, spans in enumerate(told.timeline.spans_by_rank):
        for position, span in enumerate(spans):
            costs = UNIT | {"transfer": 1}
            says = ask("why", program=as_json(program), costs=costs, rank=rank, position=position)["says"]
            busy = f"rank {rank} is busy with {spans[position - 1].label} until then"
            first = f"it is the first step of rank {rank} and waits for nothing"
            reason = pauses.get((rank, span.start), busy if position else first)
            assert says == f"{span.label} starts at {span.start}: {reason}"
    refused = ask("why", program=as_json(BROKEN["twice"]), costs=UNIT, rank=0, position=0)
    assert refused["error"] == "only a schedule that can run has times to explain; mend it first"


def test_forms_are_the_librarys_and_are_read_back():
    program = schedules.build("zbv", 2, 4)
    given = {"program": as_json(program), "costs": UNIT}
    text, csv, comms, trace = (ask("write", form=form, **given)["text"] for form in ("text", "csv", "comms", "trace"))
    assert text == str(program)
    assert [csv, comms] == [pp.to_torch_csv(program), pp.to_torch_csv(program, "compute_comms")]
    assert trace == pp.simulate(program).to_perfetto()
    for one, left_out in ((text, 0), (csv, 0), (comms, 32), (str(pp.lower(program)), 32)):
        found = ask("read", text=one)
        assert found["program"]["rows"] == program.rows()
        assert found["left_out"] == left_out
    dualpipe = as_json(schedules.build("dualpipe", 2, 4))
    assert ask("write", form="csv", program=dualpipe, costs=UNIT)["error"].startswith("torch keeps a stage on one rank")


def test_a_text_that_is_no_program_is_refused_with_a_sentence():
    assert ask("read", text="0F0 x")["error"].startswith("rank 0, position 1: 'x' is not an action")
    assert ask("read", text="0F0 " * 250_001)["error"].startswith("the text has 1000004 characters; the studio reads")
    assert ask("read", text="9999F0")["error"].startswith("the studio reads at most 1024 ranks, 4096 stages")


def test_challenges_are_judged_as_the_notebook_judges():
    """Every schedule of the registry with the challenge's ranks and microbatches, solved or not."""
    seen = []
    for challenge in CHALLENGES:
        for name in schedules.names(synchronous=True):
            try:
                program = schedules.build(name, challenge.ranks, challenge.microbatches)
            except ValueError:
                continue
            found = ask("verdict", program=as_json(program), costs=UNIT, challenge=challenge.spec)["challenge"]
            try:
                expected = judge(challenge, program.rows())
            except Wrong:
                assert found["stars"] == {}
                assert found["says"].startswith("Not yet: ")
                continue
            assert found["stars"] == {"solved": True, "time": expected.time, "memory": expected.memory}
            seen.append(challenge.name)
    assert len(set(seen)) > 5
