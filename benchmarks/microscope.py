"""torch's own parallel parts, two at a time, each beside one process in float64: loss, gradients, norm, one step.

    python benchmarks/microscope.py [--only pipeline]      every composition, or those with this in the name

A composition is a function that trains one step on every rank, written as a user of torch writes it, and returns what
it has: the loss, the whole gradients by their names, the norm, the weights after the step.  One process does the same
with the whole batch.  The verdicts:
  equal       every value agrees to 1e-12, relative to the largest number of its tensor
  differs     the first value that does not, its largest difference and the ratio to the right one, if there is one
  refused     torch raised: the first line of what it said
Where a known report or the documentation names the difference, the table has its number: that is no new finding.
"""

import argparse
import functools
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import dualpipe_lab as lab

VOCABULARY, WIDTH, LENGTH, LAYERS, BATCH = 16, 8, 4, 8, 24
MAX_NORM, LR, TOLERANCE = 0.5, 0.1, 1e-12
Values = dict[str, Any]


class Block(nn.Module):
    """A norm and a small MLP, added to what comes in (batch, length, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Net(nn.Module):
    """Token ids (batch, length) to logits (batch, length, vocabulary)."""

    def __init__(self, tied: bool = False, twice: bool = False, recompute: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleDict({str(layer): Block() for layer in range(LAYERS)})
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.double()
        if tied:
            self.head.weight = self.embed.weight
        if twice:
            self.blocks.update({str(layer): self.blocks[str(layer - 1)] for layer in range(1, LAYERS, 2)})
        self.recompute = recompute  # True, False: checkpoint with use_reentrant

    def forward(self, ids: Tensor) -> Tensor:
        """Run it."""
        x = self.embed(ids)
        for block in self.blocks.values():
            x = block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute)
        return self.head(self.norm(x))


def batch(*, unequal: bool = False) -> tuple[Tensor, Tensor]:
    """Ids and targets (batch, length); `unequal` ignores other numbers of targets in each sequence."""
    generator = torch.Generator().manual_seed(2)
    ids, targets = torch.randint(VOCABULARY, (2, BATCH, LENGTH), generator=generator)
    if unequal:
        targets = torch.where(torch.arange(LENGTH) <= torch.arange(BATCH)[:, None] // 6, targets, -100)
    return ids, targets


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1))


def sum_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1), reduction="sum")


def mine(tensors: tuple[Tensor, ...], group: Any = None) -> list[Tensor]:
    """This rank's part of the batch."""
    return [each.chunk(dist.get_world_size(group))[dist.get_rank(group)] for each in tensors]


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def mean_of(loss: Tensor, group: Any = None) -> Tensor:
    loss = whole(loss)
    dist.all_reduce(loss, group=group)
    return loss / dist.get_world_size(group)


def finish(model: nn.Module, loss: Tensor, *, clip: float | None = None, optimizer: Any = None) -> Values:
    """Clip, step, and return the values under the names of one process's model."""

    def named(values: Iterator[tuple[str, Tensor | None]]) -> Values:
        return {name.removeprefix("module."): whole(value) for name, value in values if value is not None}

    gradients = named((name, each.grad) for name, each in model.named_parameters())
    values = {"loss": whole(loss), "gradient": gradients}
    if clip is not None:
        values["norm"] = whole(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, norm_type=clip))
    (optimizer or torch.optim.SGD(model.parameters(), LR)).step()
    return values | {"weight": named(model.named_parameters())}


def one_process(
    *, net: Any = Net, unequal: bool = False, loss_of: Any = mean_loss, clip: float | None = None, times: int = 1
) -> Values:
    """What is right."""
    model = net()
    ids, targets = batch(unequal=unequal)
    for _ in range(times):
        loss = loss_of(model(ids), targets)
        loss.backward()
    return finish(model, loss, clip=clip)


class Case(NamedTuple):
    """A composition: what runs on every rank, on how many, what one process has, and who reported a difference."""

    name: str
    run: Callable[[], Values]
    ranks: int
    right: Callable[[], Values]
    known: str


CASES: dict[str, Case] = {}


def case(name: str, ranks: int = 2, known: str = "", **right: Any) -> Callable[[Callable[..., Values]], Any]:
    """Register a composition; `right` are the arguments of `one_process`."""

    def register(run: Callable[..., Values]) -> Callable[..., Values]:
        CASES[name] = Case(name, run, ranks, functools.partial(one_process, **right), known)
        return run

    return register


# ---- DDP


def ddp(net: Any = Net, *, unequal: bool = False, clip: float | None = None, **options: Any) -> Values:
    model = DistributedDataParallel(net(), **options)
    ids, targets = mine(batch(unequal=unequal))
    loss = mean_loss(model(ids), targets)
    loss.backward()
    return finish(model, mean_of(loss), clip=clip)


tied = functools.partial(Net, tied=True)
case("DDP")(ddp)
case("DDP x clipping", clip=2.0)(functools.partial(ddp, clip=2.0))
case("DDP x tied weights", net=tied)(functools.partial(ddp, tied))
case("DDP x bucket views", 4, clip=2.0)(
    functools.partial(ddp, clip=2.0, gradient_as_bucket_view=True, bucket_cap_mb=0.001)
)
case("DDP x static graph, recomputation (reentrant), tied weights", net=tied)(
    functools.partial(ddp, functools.partial(Net, tied=True, recompute=True), static_graph=True)
)
case("DDP x recomputation (not reentrant)")(functools.partial(ddp, functools.partial(Net, recompute=False)))
case("DDP x unequal numbers of targets", known="documented: DDP averages the ranks' means", unequal=True)(
    functools.partial(ddp, unequal=True)
)


@case("DDP x accumulation (no_sync)", times=2)
def _() -> Values:
    model = DistributedDataParallel(Net())
    ids, targets = mine(batch())
    with model.no_sync():
        mean_loss(model(ids), targets).backward()
    loss = mean_loss(model(ids), targets)
    loss.backward()
    return finish(model, mean_of(loss))


@case("DDP x two backwards of one forward", known="pytorch 47260 (open)")
def _() -> Values:
    model = DistributedDataParallel(Net())
    ids, targets = mine(batch())
    logits = model(ids)
    halves = [mean_loss(part, target) / 2 for part, target in zip(logits.chunk(2), targets.chunk(2), strict=True)]
    halves[0].backward(retain_graph=True)
    halves[1].backward()
    return finish(model, mean_of(sum(halves)))


@case("DDP x autograd.grad", known="documented: DDP does not work with torch.autograd.grad")
def _() -> Values:
    model = DistributedDataParallel(Net())
    ids, targets = mine(batch())
    loss = mean_loss(model(ids), targets)
    for parameter, gradient in zip(model.parameters(), torch.autograd.grad(loss, model.parameters()), strict=True):
        parameter.grad = gradient
    return finish(model, mean_of(loss))


@case("DDP x ZeroRedundancyOptimizer", clip=2.0)
def _() -> Values:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(Net())
    ids, targets = mine(batch())
    loss = mean_loss(model(ids), targets)
    loss.backward()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=LR)
    return finish(model, mean_of(loss), clip=2.0, optimizer=optimizer)


@case("DDP x uneven inputs (Join)", known="documented: Join divides by the initial number of ranks")
def _() -> Values:
    model = DistributedDataParallel(Net())
    ids, targets = batch()
    shares = [ids[:18], ids[18:]], [targets[:18], targets[18:]]
    parts = [each[dist.get_rank()].split(6) for each in shares]
    count = torch.zeros((), dtype=torch.float64)
    with model.join():
        for some, target in zip(*parts, strict=True):
            loss = mean_loss(model(some), target) / 2  # four microbatches on two ranks
            loss.backward()
            count += loss.detach()
    return finish(model, mean_of(count))


# ---- FSDP2


def fsdp(
    net: Any = Net,
    *,
    mesh: tuple[int, ...] = (),
    clip: float | None = None,
    times: int = 1,
    accumulate: bool = False,
    **options: Any,
) -> Values:
    names = ("replicate", "shard")[-len(mesh or (1,)) :]
    device_mesh = init_device_mesh("cpu", mesh or (dist.get_world_size(),), mesh_dim_names=names)
    model = net()
    for block in model.blocks.values():
        fully_shard(block, mesh=device_mesh, **options)
    fully_shard(model, mesh=device_mesh, **options)
    ids, targets = mine(batch())
    for turn in range(times):
        model.set_requires_gradient_sync(not accumulate or turn == times - 1)
        loss = mean_loss(model(ids), targets)
        loss.backward()
    return finish(model, mean_of(loss), clip=clip)


case("FSDP2")(fsdp)
case("FSDP2 x clipping", 4, clip=2.0)(functools.partial(fsdp, clip=2.0))
case("FSDP2 x clipping by the largest gradient, rows that 3 ranks share unevenly", 3, clip=float("inf"))(
    functools.partial(fsdp, clip=float("inf"))
)
case("FSDP2 x tied weights", net=tied)(functools.partial(fsdp, tied))
case("FSDP2 x accumulation", 4, times=2)(functools.partial(fsdp, times=2, accumulate=True))
case("FSDP2 x two steps' gradients, synchronized each time", times=2)(functools.partial(fsdp, times=2))
case("FSDP2 x recomputation")(functools.partial(fsdp, functools.partial(Net, recompute=False)))
case("FSDP2 x weights kept after the forward")(functools.partial(fsdp, reshard_after_forward=False))
case("FSDP2 x replicas (HSDP) x clipping", 4, clip=2.0)(functools.partial(fsdp, mesh=(2, 2), clip=2.0))


@case("FSDP2 on 4 ranks x DCP x tensor parallelism on 2 x 2", 4)
def _() -> Values:
    """Train nothing, save, load into another cut, train a step."""
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        model = Net()
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
        save({"model": get_model_state_dict(model)}, checkpoint_id=folder[0])
        with torch.no_grad():
            other = Net()
            for parameter in other.parameters():
                parameter.zero_()
        values = two_axes(other, lambda each: _loaded(each, folder[0]))
        dist.barrier()
        return values


def _loaded(model: nn.Module, folder: str) -> None:
    state = {"model": get_model_state_dict(model)}
    load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])


# ---- tensor parallelism by DTensor

MEGATRON = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def tensor_parallel(model: Any, mesh: Any, *, sequence: bool = False, vocabulary: bool = False) -> None:
    """Shard each block by columns and rows; with `sequence` also the norms, embedding and head."""
    for block in model.blocks.values():
        if sequence:
            plan = {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1)),
            }
            parallelize_module(block, mesh, plan)
        else:
            parallelize_module(block, mesh, MEGATRON)
    if sequence:
        shard = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(
                input_layouts=Shard(1),
                output_layouts=Shard(-1) if vocabulary else Replicate(),
                use_local_output=not vocabulary,
            ),
        }
        parallelize_module(model, mesh, shard)


def tp(
    *,
    sequence: bool = False,
    vocabulary: bool = False,
    unequal: bool = False,
    clip: float | None = None,
    net: Any = Net,
) -> Values:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = net()
    tensor_parallel(model, mesh, sequence=sequence, vocabulary=vocabulary)
    ids, targets = batch(unequal=unequal)
    with loss_parallel() if vocabulary else torch.enable_grad():
        logits = model(ids)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
    return finish(model, loss, clip=clip)


case("TP")(tp)
case("TP x clipping", clip=2.0)(functools.partial(tp, clip=2.0))
case("TP x sequence parallelism", 4)(functools.partial(tp, sequence=True))
case(
    "TP x sequence parallelism x clipping",
    4,
    known="pytorch 163374 (an operation in place does not change a partial gradient; ended in 2.12)",
    clip=2.0,
)(functools.partial(tp, sequence=True, clip=2.0))
case("TP x sequence parallelism x clipping by the largest gradient", clip=float("inf"))(
    functools.partial(tp, sequence=True, clip=float("inf"))
)
case("TP x sequence parallelism x recomputation", 2)(
    functools.partial(tp, sequence=True, net=functools.partial(Net, recompute=False))
)
case("TP x sequence parallelism x 3 ranks", 3)(functools.partial(tp, sequence=True))
case("TP x loss over the sharded vocabulary", 4)(functools.partial(tp, sequence=True, vocabulary=True))
case("TP x loss over the sharded vocabulary x ignored targets", 4, unequal=True)(
    functools.partial(tp, sequence=True, vocabulary=True, unequal=True)
)


def two_axes(model: Any, prepare: Callable[[nn.Module], None] = lambda model: None, **options: Any) -> Values:
    """FSDP2 or DDP beside TP, on a mesh of 2 x 2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tensor_parallel(model, mesh["tp"], sequence=options.get("sequence", False))
    if options.get("ddp"):
        model = DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    else:
        for block in model.blocks.values():
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    prepare(model)
    ids, targets = mine(batch(), mesh.get_group("dp"))
    loss = mean_loss(model(ids), targets)
    loss.backward()
    return finish(model, mean_of(loss, mesh.get_group("dp")), clip=options.get("clip"))


case("FSDP2 x TP", 4)(lambda: two_axes(Net()))
case("FSDP2 x TP x sequence parallelism", 4)(lambda: two_axes(Net(), sequence=True))
case("FSDP2 x TP x sequence parallelism x clipping", 4, clip=2.0)(lambda: two_axes(Net(), sequence=True, clip=2.0))
case("FSDP2 x TP x clipping", 4, clip=2.0)(lambda: two_axes(Net(), clip=2.0))
case("DDP x TP", 4)(lambda: two_axes(Net(), ddp=True))
case("DDP x TP x sequence parallelism", 4)(lambda: two_axes(Net(), ddp=True, sequence=True))


# ---- pipelines


class Stage(nn.Module):
    """Layers of the net, under the net's names; the first has the embedding, the last norm and head."""

    def __init__(self, model: Net, stage: int, stages: int) -> None:
        super().__init__()
        size = LAYERS // stages
        self.blocks = nn.ModuleDict(
            {str(layer): model.blocks[str(layer)] for layer in range(stage * size, (stage + 1) * size)}
        )
        self.embed = model.embed if stage == 0 else None
        self.norm, self.head = (model.norm, model.head) if stage == stages - 1 else (None, None)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """Run it."""
        x = x if self.embed is None else self.embed(x)
        x = x if scale is None else x * scale
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


class Scaled(Net):
    """The net whose embedding is multiplied by a table over positions."""

    def forward(self, ids: Tensor) -> Tensor:
        """Run it."""
        x = self.embed(ids) * TABLE
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x))


TABLE = torch.arange(1.0, LENGTH + 1, dtype=torch.float64)[:, None]  # positions x 1
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")


def pipeline(
    schedule: str = "Schedule1F1B",
    *,
    microbatches: int = 4,
    loss_of: Any = mean_loss,
    unequal: bool = False,
    clip: float | None = None,
    times: int = 1,
    net: Any = Net,
    data: str = "",
    tensor: bool = False,
    table: bool = False,
    **options: Any,
) -> Values:
    """A step of a pipeline over two ranks; with `data` (DDP, FSDP2) or `tensor` over four."""
    beside = "dp" if data else "tp"
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", beside))
    rank, group = mesh.get_local_rank("pp"), mesh.get_group("pp")
    kind = getattr(schedules, schedule)
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    stages = 2 if single else 4
    places = [rank] if single else [rank, 3 - rank] if schedule in V_SHAPED else [rank, rank + 2]
    model, built = net(), []
    for place in places:
        module: nn.Module = Stage(model, place, stages)
        if tensor:
            for block in module.blocks.values():  # type: ignore[union-attr]
                parallelize_module(block, mesh["tp"], MEGATRON)
        if data == "DDP":
            module = DistributedDataParallel(module, process_group=mesh.get_group("dp"))
        elif data == "FSDP2":
            fully_shard(module, mesh=mesh["dp"])
        built.append(PipelineStage(module, place, stages, torch.device("cpu"), group=group))
    engine = kind(built[0] if single else built, microbatches, loss_fn=loss_of, **options)
    ids, targets = mine(batch(unequal=unequal), mesh.get_group("dp")) if data else batch(unequal=unequal)
    first, last = 0 in places, stages - 1 in places
    extra = {"scale": TABLE} if table and first else {}
    for _ in range(times):
        losses: list[Tensor] = []
        engine.step(*([ids] if first else []), **extra, **({"target": targets, "losses": losses} if last else {}))
    modules = nn.ModuleList([each.submod for each in built])
    loss = torch.stack(losses).detach().mean() if last else torch.zeros((), dtype=torch.float64)
    if loss_of is sum_loss:
        loss = loss * microbatches
    dist.all_reduce(loss)
    values = finish(modules, loss / (dist.get_world_size() // 2), clip=clip)
    for name in ("gradient", "weight"):  # "0.module.blocks..." is of the first of this rank's stages
        values[name] = {key.partition(".")[2].removeprefix("module."): each for key, each in values[name].items()}
    return values


SINGLE = ("ScheduleGPipe", "Schedule1F1B")
LOOPED = ("ScheduleLoopedBFS", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", *V_SHAPED)
for schedule in (*SINGLE, *LOOPED):
    short = schedule.removeprefix("Schedule")
    case(f"pipeline {short}")(functools.partial(pipeline, schedule))
    for data in ("DDP", "FSDP2"):
        split = data == "DDP" and schedule in ("ScheduleInterleavedZeroBubble", *V_SHAPED)
        known = "pytorch 144530 (open: the split backward calls no hook of DDP)" if split else ""
        case(f"pipeline {short} x {data}", 4, known)(functools.partial(pipeline, schedule, data=data))
case("pipeline 1F1B x TP", 4)(functools.partial(pipeline, tensor=True))
case("pipeline InterleavedZeroBubble x TP", 4)(
    functools.partial(pipeline, "ScheduleInterleavedZeroBubble", tensor=True)
)
case("pipeline 1F1B x clipping", known="torchtitan 596 (each rank clips by the norm of its own stages)", clip=2.0)(
    functools.partial(pipeline, clip=2.0)
)
case("pipeline 1F1B x FSDP2 x clipping", 4, known="torchtitan 596", clip=2.0)(
    functools.partial(pipeline, data="FSDP2", clip=2.0)
)
case("pipeline 1F1B x tied weights", known="each stage trains its own copy; no sum is offered", net=tied)(
    functools.partial(pipeline, net=tied)
)
case("pipeline 1F1B x accumulation", known="torchtitan 1733 (scale_grads divides what is accumulated again)", times=2)(
    functools.partial(pipeline, times=2)
)
case("pipeline 1F1B x accumulation, scale_grads=False", times=2, loss_of=sum_loss)(
    functools.partial(pipeline, times=2, loss_of=sum_loss, scale_grads=False)
)
case(
    "pipeline 1F1B x a summed loss",
    known="torchtitan 2972 (scale_grads divides a sum by the microbatches)",
    loss_of=sum_loss,
)(functools.partial(pipeline, loss_of=sum_loss))
case("pipeline 1F1B x unequal numbers of targets", known="documented: microbatches' means are averaged", unequal=True)(
    functools.partial(pipeline, unequal=True)
)
case("pipeline 1F1B x microbatches of 5, 5, 5, 5 and 4 sequences")(functools.partial(pipeline, microbatches=5))
case("pipeline 1F1B x a keyword without a batch dimension", known="Automodel 3208, torchtitan 4098", net=Scaled)(
    functools.partial(pipeline, table=True)  # a table over positions is divided among the microbatches
)
for schedule in ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"):
    case(
        f"pipeline {schedule[8:]} x a block used twice",
        known="pytorch 180952 (open)",
        net=functools.partial(Net, twice=True),
    )(functools.partial(pipeline, schedule, net=functools.partial(Net, twice=True)))


# ---- others


@case(
    "all_reduce of distributed.nn x a loss on every rank",
    known="pytorch 58005 (the backward sums the ranks' gradients)",
)
def _() -> Values:
    """Row-parallel by hand: partial sums are added, every rank computes the same loss."""
    from torch.distributed.nn.functional import all_reduce

    model = Net()
    rank, size = dist.get_rank(), dist.get_world_size()

    def forward(block: Any, x: Tensor) -> Tensor:
        columns = block.up(block.norm(x)).chunk(size, -1)[rank]
        partial = nn.functional.silu(columns) @ block.down.weight.chunk(size, 1)[rank].T
        return x + all_reduce(partial) + block.down.bias

    x = model.embed(batch()[0])
    for block in model.blocks.values():
        x = forward(block, x)
    loss = mean_loss(model.head(model.norm(x)), batch()[1])
    loss.backward()
    for name, parameter in model.named_parameters():
        if "up" in name or "down.weight" in name:
            dist.all_reduce(parameter.grad)
    return finish(model, loss)


class Experts(nn.Module):
    """A token goes to the expert of its id: one expert on each of two ranks, or both here."""

    def __init__(self, parallel: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.experts = nn.ModuleDict({"0": nn.Linear(WIDTH, WIDTH), "1": nn.Linear(WIDTH, WIDTH)}).double()
        self.double()
        if parallel:
            del self.experts[str(1 - dist.get_rank())]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
                self, [f"experts.{dist.get_rank()}.{each}" for each in ("weight", "bias")]
            )

    def forward(self, ids: Tensor) -> Tensor:
        """Run it."""
        x, expert = self.embed(ids).flatten(0, 1), ids.flatten() % 2
        order = expert.argsort(stable=True)
        sent = torch.bincount(expert, minlength=2)
        rows = x[order]
        if len(self.experts) == 2:
            rows = torch.cat(
                [layer(part) for layer, part in zip(self.experts.values(), rows.split(sent.tolist()), strict=True)]
            )
        else:
            received = torch.empty_like(sent)
            dist.all_to_all_single(received, sent)
            rows = all_to_all_single_autograd(rows, received.tolist(), sent.tolist(), dist.group.WORLD)
            (layer,) = self.experts.values()
            rows = all_to_all_single_autograd(layer(rows), sent.tolist(), received.tolist(), dist.group.WORLD)
        return self.head(x + rows[order.argsort()]).unflatten(0, ids.shape)


@case("EP x DDP", known="pytorch 160285 (experts' gradients are sums where DDP's are means)", net=Experts)
def _() -> Values:
    return ddp(functools.partial(Experts, parallel=True))


@case("context parallelism (ring attention)")
def _() -> Values:
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    torch.manual_seed(3)
    qkv = [torch.randn(1, 2, 8, 4, dtype=torch.float64) for _ in range(3)]
    with context_parallel(mesh, buffers=qkv, buffer_seq_dims=[2] * 3):
        local = [each.detach().requires_grad_() for each in qkv]
        nn.functional.scaled_dot_product_attention(*local, is_causal=True).sum().backward()
    return {"gradient": {}}


@case("SyncBatchNorm x DDP")
def _() -> Values:
    return ddp(lambda: nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(Net(), nn.BatchNorm1d(LENGTH).double())))


def observe(rank: int, world_size: int, name: str) -> Values:
    warnings.simplefilter("ignore")
    return CASES[name].run()


class Verdict(NamedTuple):
    """What came out of one composition."""

    word: str
    detail: str
    seconds: float


def compare(found: list[Values], right: Values) -> str:
    """Return the first difference, in the order of computing, or nothing."""
    for kind in ("loss", "gradient", "norm", "weight"):
        expected = right.get(kind)
        if expected is None:
            continue
        table = expected if isinstance(expected, dict) else {"": expected}
        seen = set()
        for rank, values in enumerate(found):
            own = values.get(kind, {}) if isinstance(expected, dict) else {"": values[kind]}
            for name, value in own.items():
                wanted = table[name]
                seen.add(name)
                worst = float((value - wanted).abs().max())
                if not worst <= TOLERANCE * max(1.0, float(wanted.abs().max())):
                    ratios = (value / wanted)[wanted.abs() > 1e-9]
                    even = ratios.numel() and float(ratios.max() - ratios.min()) < 1e-6
                    what = f"{float(ratios.mean()):.4g} times the right one" if even else f"by {worst:.1e}"
                    return f"{kind} {name} on rank {rank}: {what}".replace("  ", " ")
        if missing := sorted(set(table) - seen):
            return f"{kind} {missing[0]}: on no rank"
    return ""


def examine(one: Case) -> Verdict:
    started = time.perf_counter()
    try:
        found = lab.launch(observe, one.ranks, one.name, timeout=60, output="collect")
    except Exception as error:
        said = [line for line in str(error).splitlines() if line.strip()]
        reason = next((line for line in said if "Error" in line and "rank" not in line.lower()[:5]), said[0])
        return Verdict("refused", reason.strip()[:110], time.perf_counter() - started)
    difference = compare(found, one.right())
    return Verdict("differs" if difference else "equal", difference, time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="compositions with this in their names")
    chosen = [one for one in CASES.values() if parser.parse_args().only in one.name]
    print(f"torch {torch.__version__}, {len(chosen)} compositions, GLOO, float64")
    counts: dict[str, int] = {}
    for one in chosen:
        verdict = examine(one)
        counts[verdict.word] = counts.get(verdict.word, 0) + 1
        known = f"  [{one.known}]" if one.known and verdict.word != "equal" else ""
        print(
            f"{one.name:75}{one.ranks:2}  {verdict.word:8}{verdict.detail}{known}  ({verdict.seconds:.1f} s)",
            flush=True,
        )
    print(", ".join(f"{count} {word}" for word, count in counts.items()))


if __name__ == "__main__":
    main()
