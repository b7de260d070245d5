"""NCCL's refusals and its order of operations, in front of GLOO.

Tensors of the host travel over the GLOO of the process group.  Those of the device travel over a second one, its twin:
as in torch, each group has one stream for collectives and batches, and one for each pair of ranks that exchange
messages outside of batches.  What is in a stream runs one after the other, in the order of the calls.
"""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist

NAME = "standin"
TYPES = {
    torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
}  # fmt: skip
REDUCTIONS = {"SUM", "PRODUCT", "MIN", "MAX", "AVG"}
AS_REAL = {"allreduce_", "broadcast_"}  # torch hands complex numbers to NCCL as pairs here
PAIR_TAG, BATCH_TAG = 1, 2  # different communicators: a message in a batch does not meet one outside
_twins, _streams = {}, {}
_batch = None


def register():
    """Make torch.distributed know the back end, and see where a batch of messages begins and ends."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _make_gloo, devices=["cuda"])
        dist.batch_isend_irecv = _watched(dist.batch_isend_irecv)


def _make_gloo(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timedelta(days=1))


def _watched(start_batch):
    def batch_isend_irecv(operations):
        global _batch
        if not any(op.tensor.is_cuda for op in operations):
            return start_batch(operations)
        _batch = []
        try:
            works = start_batch(operations)
            _run_batch(_batch)
            return works
        finally:
            _batch = None

    return batch_isend_irecv


def run(func, args, kwargs, is_on_device, tensors_in):
    """Run an operation of torch.distributed where its tensors are, or refuse it."""
    name = func.overloadpacket.__name__.split(".")[-1]
    tensors = tensors_in(args, kwargs)
    if name == "barrier" or not any(map(is_on_device, tensors)):
        return func(*args, **kwargs)
    if not all(map(is_on_device, tensors)):
        raise RuntimeError(f"{name}: Tensors must be CUDA and dense")
    check(name, args, tensors)
    args, group = _with_twin(args)
    if name in ("send", "recv_"):
        return _message(name, func, args, group)
    return _collective(name, func, args, kwargs, group)


def check(name, args, tensors):
    """Refuse tensors and reductions that NCCL does not take."""
    if name == "recv_any_source_":
        raise NotImplementedError("ProcessGroupNCCL does not support recvAnysource")
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: Tensors must be contiguous")
        if tensor.dtype not in TYPES and not (tensor.is_complex() and name in AS_REAL):
            raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")
    for reduction in filter(None, map(_reduction, args)):
        if reduction not in REDUCTIONS:
            raise ValueError(f"Cannot use ReduceOp.{reduction} with NCCL")
        if reduction == "AVG" and tensors[0].dtype == torch.bool:
            raise TypeError("Cannot use ReduceOp.AVG with Bool")
        if reduction not in ("SUM", "AVG") and tensors[0].is_complex():
            raise RuntimeError(f"all_reduce does not support {reduction} on complex tensors")
        if tensors[0].dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            raise TypeError("Unsupported Float8 type for NCCL reduction")


def _reduction(value):
    """Name of an argument that says how to reduce; None for any other."""
    if isinstance(value, torch.ScriptObject) and str(value._type()).endswith("c10d.ReduceOp"):
        return dist.ReduceOp.RedOpType(value.op()).name
    return None


def _with_twin(args):
    """The arguments with the twin of their process group, and the twin."""
    for position, value in enumerate(args):
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            group = dist.ProcessGroup.unbox(value)
            if group.group_name not in _twins:
                twin = dist.ProcessGroup(group.rank(), group.size())
                backend = group._get_backend(torch.device("cuda"))
                twin._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
                _twins[group.group_name] = twin
            twin = _twins[group.group_name]
            return (*args[:position], twin.boxed(), *args[position + 1 :]), (group.group_name, twin)
    raise AssertionError("an operation of c10d without a process group")


def _stream(key):
    if key not in _streams:
        _streams[key] = ThreadPoolExecutor(1)
    return _streams[key]


def _queued(key, action):
    """Run `action` when all earlier ones of its stream are done; return torch's handle of it."""
    done = torch.futures.Future()

    def step():
        try:
            done.set_result(action())
        except BaseException as error:
            done.set_exception(error)

    _stream(key).submit(step)
    return torch._C._distributed_c10d._create_work_from_future(done).boxed()


def _collective(name, func, args, kwargs, group):
    def action():
        result = func(*args, **kwargs)
        work = result[-1] if isinstance(result, tuple) else result
        dist.Work.unbox(work).wait()

    work = _queued((group[0], "collectives"), action)
    return work if len(func._schema.returns) == 1 else (args[0], work)


def _message(name, func, args, group):
    tensors, _, peer, tag = args
    if tag:
        raise ValueError(f"NCCL has no tags, got tag={tag}")
    call = group[1].send if name == "send" else group[1].recv
    if _batch is not None:
        done = torch.futures.Future()
        _batch.append((group, call, tensors, peer, done))
        return torch._C._distributed_c10d._create_work_from_future(done).boxed()
    return _queued((group[0], peer), lambda: call(tensors, peer, PAIR_TAG).wait())


def _run_batch(messages):
    """One kernel: it starts when the earlier ones of its stream are done, and all messages end together."""
    if not messages:
        return

    def action():
        try:
            for work in [call(tensors, peer, BATCH_TAG) for _, call, tensors, peer, _ in messages]:
                work.wait()
        except Exception as error:
            for *_, done in messages:
                done.set_exception(error)
            return
        for *_, done in messages:
            done.set_result(None)

    _stream((messages[0][0][0], "collectives")).submit(action)
