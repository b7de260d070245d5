"""A step cut out of a run: what belongs to it, moved to time 0."""

from dualpipe_lab.timeline import Message, Span, Timeline


def work(rank, start, kind, microbatch, stage=0):
    return Span(rank, start, start + 1, kind, stage, microbatch, f"{stage}{kind}{microbatch}")


def two_steps():
    """Rank 1 is late with its first step: its spans overlap rank 0's second one in time."""
    first = [work(0, 10, "F", 0), Span(0, 11, 12, "collective"), work(0, 15, "B", 0)]
    rows = [
        [*first, work(0, 16, "F", 0), work(0, 21, "B", 0)],
        [work(1, 12, "F", 0, 1), work(1, 13, "B", 0, 1), work(1, 18, "F", 0, 1), work(1, 19, "B", 0, 1)],
    ]
    messages = [
        Message(0, 1, 11, 12, "0F0", 8, 11),
        Message(1, 0, 14, 15, "1B0", 8),
        Message(0, 1, 16, 17, "kinds", 8),
        Message(0, 1, 17, 18, "0F0", 8),
        Message(1, 0, 20, 21, "1B0", 8),
    ]
    return Timeline("run", rows, messages, "measured", "ns")


def test_steps_are_separated_by_the_first_action_that_repeats():
    first, second = two_steps().steps()
    assert [[span.label for span in spans] for spans in first.spans_by_rank] == [["0F0", "0B0"], ["1F0", "1B0"]]
    assert [span.start for span in first.spans_by_rank[0]] == [0, 5]
    assert [span.start for span in second.spans_by_rank[1]] == [2, 3]
    assert (first.makespan, second.makespan) == (6, 6)
    assert (first.source, first.unit, first.name) == ("measured", "ns", "run")


def test_a_message_belongs_to_the_step_that_made_it():
    first, second = two_steps().steps()
    assert first.messages == (Message(0, 1, 1, 2, "0F0", 8, 1), Message(1, 0, 4, 5, "1B0", 8))
    assert second.messages == (Message(0, 1, 1, 2, "0F0", 8), Message(1, 0, 4, 5, "1B0", 8))


def test_a_pair_repeats_an_action_too():
    pair = Span(0, 4, 5, "F&B", 0, 1, "pair", ((0, "F", 1), (0, "B", 0)))
    timeline = Timeline("run", [[work(0, 0, "F", 0), pair, work(0, 6, "F", 1)]])
    assert [len(step.spans_by_rank[0]) for step in timeline.steps()] == [2, 1]


def test_a_rank_without_work_and_a_run_without_steps():
    assert Timeline("run", [[work(0, 3, "F", 0)], []]).steps()[0].spans_by_rank == ((work(0, 0, "F", 0),), ())
    assert Timeline("run", [[Span(0, 0, 1, "compute")]]).steps() == []


def test_between_keeps_everything_that_began_there():
    part = two_steps().between(11, 16)
    assert [[span.kind for span in spans] for spans in part.spans_by_rank] == [["collective", "B"], ["F", "B"]]
    assert part.messages == (Message(0, 1, 0, 1, "0F0", 8, 0), Message(1, 0, 3, 4, "1B0", 8))
