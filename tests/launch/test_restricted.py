"""What the grader opens of a rank's pickles: data of many kinds, nothing that acts."""

import collections
import fractions
import pickle
import typing
from dataclasses import fields, is_dataclass

import numpy as np
import pytest
import torch

import dualpipe_lab as lab
from dualpipe_lab.launch import payload, restricted
from dualpipe_lab.launch.record.ledger import Entry, RankLedger
from dualpipe_lab.launch.record.rank_status import RankStatus
from dualpipe_lab.launch.record.trace import RankTrace
from dualpipe_lab.timeline import Span

PLAIN = [
    1, 2.5, "a\ud800", None, ..., True, 10**30, b"x", bytearray(b"y"), [1, (2, {3: 4})], {1, 2}, frozenset([3]),
    complex(1, 2), range(3), slice(1, 2), fractions.Fraction(1, 3), collections.Counter("aab"), int, list,
    collections.OrderedDict(a=1), collections.defaultdict(list, {1: [2]}), collections.deque([1], 3), torch.float32,
    torch.Size([1, 2]), torch.device("cpu"), np.float64(3), np.int8(-3), np.bool_(True), np.str_("ab"),
    Span(0, 1, 2, "F"), lab.Action(0, "F", 1),
]  # fmt: skip
TENSORS = [
    torch.arange(3), torch.zeros(0, 3), torch.tensor(3.0), torch.tensor([True]), torch.ones(4, 4).t(),
    torch.ones(2, 2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.complex64), torch.ones(2).requires_grad_(),
    torch.nn.Parameter(torch.ones(3)),
]  # fmt: skip
ARRAYS = [
    np.arange(6).reshape(2, 3), np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.zeros((0, 2)), np.array(3.0),
    np.array(["a", "bc"]), np.arange(9)[::2],
]  # fmt: skip


@pytest.mark.parametrize("loads", [restricted.loads, payload.loads], ids=["restricted", "plain"])
def test_data_arrives_as_it_is(loads):
    for value in PLAIN:
        back = loads(payload.dumps(value))
        assert (type(back), back) == (type(value), value)
    for tensor in TENSORS:
        back = loads(payload.dumps(tensor))
        assert (type(back), back.dtype, back.requires_grad) == (type(tensor), tensor.dtype, tensor.requires_grad)
        assert torch.equal(back, tensor)
    for array in ARRAYS:
        back = loads(payload.dumps(array))
        assert (back.dtype, back.shape, back.flags.fnc) == (array.dtype, array.shape, array.flags.fnc)
        assert (back == array).all()
        assert back.flags.writeable


class Reduced:
    def __init__(self, *parts):
        self.parts = parts

    def __reduce__(self):
        return self.parts


NO_DATA = [
    Reduced(exec, ("raise SystemExit",)), Reduced(getattr, (1, "real")), Reduced(type, ("A", (), {})),
    Reduced(payload.loads, (pickle.dumps(1),)), Reduced(torch.storage._load_from_bytes, (b"",)),
    Reduced(collections.deque, ([], 1), {"a": 1}), print, lambda: 1, ValueError("x"), np.array([object()]),
    torch.nn.Linear(1, 1),
]  # fmt: skip


def crafted(*opcodes):
    return b"\x80\x02" + b"".join(opcodes) + pickle.STOP


NAMED = b"cdualpipe_lab.timeline.model\nTimeline\n"
TEXT = b"X\x05\x00\x00\x00title"
CRAFTED = [
    crafted(NAMED, pickle.NONE, b"}", TEXT, b"K\x01s", pickle.TUPLE2, pickle.BUILD),  # sets an attribute of a class
    crafted(NAMED, b"}", TEXT, b"K\x01s", pickle.BUILD),
    crafted(pickle.MARK, NAMED, TEXT, b"]", pickle.OBJ),  # calls a constructor
    crafted(pickle.MARK, TEXT, b"]", b"idualpipe_lab.timeline.model\nTimeline\n"),
    crafted(NAMED, TEXT, b"]", pickle.TUPLE2, pickle.REDUCE),
    crafted(b"cdualpipe_lab.launch.payload\n_rebuild_array\n", b"}", TEXT, b"K\x01s", pickle.BUILD),
    crafted(b"cdualpipe_course.grading.evaluator\nmain\n"),
    crafted(b"cdualpipe_course.registry\nfind\n"),
    b"",
    b"junk",
    payload.dumps([1, 2])[:-4],
]


def test_what_is_no_data_neither_calls_nor_changes_a_class(subtests):
    before = dict(vars(lab.Timeline))
    for number, data in enumerate([*map(payload.dumps, NO_DATA), *CRAFTED]):
        words = r"is no data|calls|cannot be read as data" if number < len(NO_DATA) else None
        with subtests.test(number=number), pytest.raises(restricted.Refused, match=words):
            restricted.loads(data)
        assert dict(vars(lab.Timeline)) == before


def records_in(annotation):
    """Every class of this library in a type, and in the fields of its records."""
    inner = [found for argument in typing.get_args(annotation) for found in records_in(argument)]
    if isinstance(annotation, type) and annotation.__module__.startswith("dualpipe_lab"):
        hints = typing.get_type_hints(annotation)
        names = [f.name for f in fields(annotation)] if is_dataclass(annotation) else list(hints)
        inner += [annotation, *(found for name in names for found in records_in(hints[name]))]
    return inner


def test_the_tables_have_all_that_every_rank_sends():
    """A new record in an answer, a ledger or a trace has to be entered, or nothing can be graded."""
    sent = {found for root in (RankStatus, RankLedger, Entry, RankTrace) for found in records_in(root)}
    assert len(sent) >= 9
    missing = {cls for cls in sent if cls.__name__ not in restricted.RECORDS.get(cls.__module__, ())}
    assert not missing


def test_launches_work_and_names_of_ranks_are_told():
    def busy(rank, world_size):
        total = torch.full((4,), float(rank))
        lab.comm.all_reduce(total)
        other = lab.comm.isend(total, 1 - rank) if rank else lab.comm.irecv(torch.empty(4), 1)
        other.wait()
        with lab.span("work"):
            lab.compute(3)
        return total, np.float32(rank)

    with payload.data_only():
        found = lab.launch(busy, 2, clock="virtual")
        assert found[0][0].tolist() == [1.0] * 4
        assert found.ledger.count("all_reduce") == 2
        assert found.timeline.makespan > 0
        with pytest.raises(lab.RankError, match=r"rank 0 of 1 returned a value that .*is no data; return numbers"):
            lab.launch(lambda rank, world_size: ValueError("x"), 1)
        with pytest.raises(lab.RankError, match="raised ValueError: bad") as caught:
            lab.launch(lambda rank, world_size: [][0] if rank else _raise(ValueError("bad")), 1)
        assert caught.value.failures[0].exception is None
    assert isinstance(lab.launch(lambda rank, world_size: ValueError("x"), 1)[0], ValueError)


def _raise(error):
    raise error


def test_an_unknown_message_is_refused():
    def forge(rank, world_size):
        import gc

        from dualpipe_lab.launch.rank import _Channel

        (mailbox,) = [found for found in gc.get_objects() if isinstance(found, _Channel)]
        mailbox.send("output", 3)

    with pytest.raises(restricted.Refused, match="an unknown message, 'output'"):
        lab.launch(forge, 1)
