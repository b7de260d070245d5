"""The stand-in for NCCL refuses what CUDA and NCCL refuse; each refusal of it, and of `comm` on it, has a test."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dualpipe_lab as lab

pytestmark = pytest.mark.usefixtures("on_stand_in")


def launch(fn, world_size=2, *args, **options):
    return lab.launch(fn, world_size, *args, backend="nccl", output="collect", **options)


WIDE, BITS = torch.ones(2, 4), torch.ones(2, dtype=torch.bool)
BOTH, TYPE = "RuntimeError: Expected all tensors to be on the same device", "TypeError: Input tensor data type is not"
CONTIGUOUS = "pass tensor.contiguous() and copy the result back"
REFUSED = [  # on the device d; how the sentence begins or ends
    (lambda d: torch.ones(3, device=d) + torch.ones(3), BOTH),
    (lambda d: torch.ones(2, 2, device=d) @ torch.ones(2, 2), BOTH),
    (lambda d: torch.ones(3).add_(torch.ones(3, device=d)), BOTH),
    (lambda d: torch.mul(torch.ones(3, device=d), 2, out=torch.empty(3)), BOTH),
    (lambda d: nn.Linear(2, 2)(torch.ones(1, 2, device=d)), BOTH),
    (lambda d: torch.ones(3)[torch.tensor([0], device=d)], "RuntimeError: indices should be"),
    (lambda d: torch.ones(3, device=d).numpy(), "TypeError: can't convert cuda:0"),
    (lambda d: setattr(nn.Parameter(torch.ones(2, device=d)), "grad", torch.ones(2)), "RuntimeError: assigned grad"),
    (lambda d: torch.randn(3, device=d, generator=torch.Generator()), "RuntimeError: Expected a 'cuda' device type"),
    (lambda d: torch.empty(3, device=d).normal_(generator=torch.Generator()), "RuntimeError: Expected a 'cuda' device"),
    (lambda d: torch.ones(3, device="cuda:5"), "RuntimeError: a rank has one device"),
    # NCCL, without `comm`, which says it first: in the words of torch
    (lambda d: dist.all_reduce(WIDE.to(d)[:, :2]), "ValueError: allreduce_: Tensors must be contiguous"),
    (
        lambda d: dist.all_gather_into_tensor(torch.ones(1), torch.ones(1, device=d)),
        "RuntimeError: _allgather_base_: Tensors must be CUDA and dense",
    ),
    (lambda d: dist.all_reduce(torch.ones(2, dtype=torch.int16, device=d)), TYPE),
    (lambda d: dist.reduce(torch.ones(2, dtype=torch.complex64, device=d), 0), TYPE),
    (
        lambda d: dist.all_reduce(torch.ones(2, dtype=torch.int32, device=d), dist.ReduceOp.BAND),
        "ValueError: Cannot use ReduceOp.BAND with NCCL",
    ),
    (lambda d: dist.all_reduce(BITS.to(d), dist.ReduceOp.AVG), "TypeError: Cannot use ReduceOp.AVG with Bool"),
    (lambda d: dist.all_reduce(torch.ones(2, device=d).to(torch.float8_e5m2)), "TypeError: Unsupported Float8 type"),
    (lambda d: dist.recv(torch.ones(2, device=d)), "NotImplementedError: ProcessGroupNCCL does not support recvAny"),
    (lambda d: dist.isend(torch.ones(2, device=d), 0, tag=3), "ValueError: NCCL has no tags, got tag=3"),
    (lambda d: dist.all_reduce(torch.ones(2, dtype=torch.complex64, device=d)), "accepted"),
    (lambda d: dist.all_reduce(torch.ones(2)), "accepted"),  # tensors of the host travel over GLOO
    # `comm`, by back end, with a remedy
    (lambda d: lab.comm.all_reduce(WIDE.to(d)[:, :2]), CONTIGUOUS),
    (lambda d: lab.comm.all_reduce(WIDE[:, :2]), CONTIGUOUS),
    (
        lambda d: lab.comm.all_gather_single(torch.ones(2), torch.ones(2, device=d)),
        "got cpu and cuda:0; move them with .to(...)",
    ),
    (
        lambda d: lab.comm.all_reduce(torch.ones(2, dtype=torch.int16, device=d)),
        "NCCL does not know torch.int16; pass tensor.view(torch.uint8), or 32 bits",
    ),
    (
        lambda d: lab.comm.reduce(torch.ones(2, dtype=torch.complex64, device=d), 0),
        "NCCL does not know torch.complex64; pass torch.view_as_real(tensor)",
    ),
    (lambda d: lab.comm.irecv(torch.ones(2, device=d)), "got src=None; name the sender"),
    (
        lambda d: lab.comm.irecv(torch.ones(2, device=d), 0, tag=1),
        "leave the tag out and post receives in the order of the sends",
    ),
    (lambda d: lab.comm.all_reduce(torch.ones(2)), "accepted"),
]


def test_what_cuda_and_nccl_refuse_is_refused():
    """Tensors of the device and of the host do not mix."""

    def fn(rank, world_size):
        found = []
        for attempt, _ in REFUSED:
            try:
                attempt(lab.device())
                found.append("accepted")
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}")
        return found

    for text, (_, words) in zip(launch(fn, 1)[0], REFUSED, strict=True):
        assert text.startswith(words) or text.endswith(words)


def test_a_group_without_a_back_end_for_the_cpu_refuses_its_tensors():
    def fn(rank, world_size):
        lab.comm.all_reduce(torch.ones(2), group=dist.new_group([0, 1], backend="standin"))

    with pytest.raises(lab.RankError, match="the group carries tensors on cuda, got one on cpu; move it with"):
        launch(fn)


def exchange(first, second):
    """Rank 0 begins with its operation `first`, rank 1 with `second`; each waits for both at the end."""

    def fn(rank, world_size):
        mine, theirs = torch.full((2,), float(rank), device=lab.device()), torch.empty(2, device=lab.device())
        start = {"send": lambda: dist.isend(mine, 1 - rank), "receive": lambda: dist.irecv(theirs, 1 - rank)}
        order = sorted(start, key=(first, second)[rank].__ne__)
        for work in [start[name]() for name in order]:
            work.wait()
        return theirs.tolist()

    return launch(fn, timeout=4)


def test_messages_of_a_pair_run_in_the_order_of_the_calls():
    """Without `comm`: where both ranks begin with a receive, or both with a send, each waits for the other."""
    assert exchange("send", "receive") == [[1.0, 1.0], [0.0, 0.0]]
    for both in ("send", "receive"):
        with pytest.raises(lab.RankTimeout):
            exchange(both, both)


def test_a_batch_ends_together_and_blocks_what_comes_after_it():
    def batched(rank, world_size):
        mine, theirs = torch.full((2,), float(rank), device=lab.device()), torch.empty(2, device=lab.device())
        messages = [lab.comm.P2P("irecv", theirs, 1 - rank), lab.comm.P2P("isend", mine, 1 - rank)]
        for work in lab.comm.batch_isend_irecv(messages):
            work.wait()
        return theirs.tolist()

    def posted_ahead(rank, world_size):
        x, y = torch.ones(2, device=lab.device()), torch.empty(2, device=lab.device())
        if rank == 0:
            works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, y, 1)])
        dist.all_reduce(x)
        if rank == 1:
            works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 0)])
        works[0].wait()

    assert launch(batched) == [[1.0, 1.0], [0.0, 0.0]]
    with pytest.raises(lab.RankTimeout):
        launch(posted_ahead, timeout=4)


def test_comm_refuses_the_order_that_may_wait_for_itself():
    def fn(rank, world_size):
        x = torch.ones(2, device=lab.device())
        lab.comm.irecv(torch.empty_like(x), 1 - rank)
        lab.comm.isend(x, 1 - rank)

    with pytest.raises(lab.RankError, match="is not waited for; start both in one batch_isend_irecv, or wait first"):
        launch(fn)


def test_arguments_arrive_on_the_device_and_values_come_back_on_the_cpu():
    def fn(rank, world_size, x, nested, same):
        assert same[0] is same[1]
        places = {t.device for t in (x, nested["a"][0], nested["b"][0], *nested["m"].parameters(), *same)}
        assert nested["b"][0].is_leaf
        return places, isinstance(nested["p"], nn.Parameter), {"x": x, "b": [nested["b"][0] * 2]}, nested["m"]

    x, leaf = torch.arange(3.0), torch.ones(2, requires_grad=True)
    nested = {"a": (x,), "b": [leaf], "m": nn.Linear(2, 1), "p": nn.Parameter(torch.ones(1)), "word": "same"}
    for rank, (places, is_parameter, value, model) in enumerate(launch(fn, 2, x, nested, [leaf, leaf])):
        assert places == {torch.device("cuda", rank)}
        assert is_parameter
        assert torch.equal(value["x"], x)
        assert torch.equal(model.weight, nested["m"].weight)
        assert value["b"][0].device.type == "cpu"
    assert lab.device() == torch.device("cpu")


def test_spans_are_measured_by_events_and_the_clock_waits_for_the_device():
    def fn(rank, world_size):
        began = lab.now()
        with lab.span("F", 0, 0):
            lab.comm.all_reduce(torch.ones(2, device=lab.device()))
        lab.comm.barrier()
        return began, lab.now()

    run = launch(fn)
    assert run.timeline.source == "measured"
    for (began, ended), spans in zip(run, run.timeline.spans_by_rank, strict=True):
        span = next(span for span in spans if span.kind == "F")
        assert began - 1_000_000 < span.start < span.end < ended + 1_000_000


@pytest.mark.parametrize("options", [{"link": lab.Link(gbps=1, latency_ms=1)}, {"clock": "virtual"}])
def test_emulated_time_is_refused_before_any_process_starts(options):
    with pytest.raises(ValueError, match=r"emulates another; leave it out, or use backend='gloo'"):
        launch(print, 2, **options)
