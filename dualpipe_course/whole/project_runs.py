"""The runs behind the project's checks: what a milestone's answer does on real ranks, beside one process.

Chapter: book/whole/project.  In: the answer, what one process has.  Out: a `Found` of each rank.
  gradients   a pipeline with tp and dp runs; the answer sums and clips; every rank compares its own shards
  optimizer   three steps on data ranks with summands of gradients; weights, bytes alive, bytes sent
  save, load  one plan trains and saves, another plan goes on
  steps       the whole step with experts: loss, norm, weights, and the bytes of its third
"""

import zlib
from collections.abc import Callable, Mapping
from functools import partial
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from dualpipe_course.comparison import Found, Numbers
from dualpipe_course.meter import MemoryMeter, Meter
from dualpipe_course.whole.project_parts import (
    BATCH,
    DENSE,
    DENSE_PLAN,
    LENGTH,
    LOG_BYTES,
    RESUMED_ON,
    SAVED,
    SAVED_ON,
    SPARSE,
    SPARSE_PLAN,
    Parts,
    Weight,
    assemble,
    run_microbatches,
)
from dualpipe_lab import comm, dp, train
from dualpipe_lab.data import frozen_corpus
from dualpipe_lab.train.sampler import Batch

Full = Mapping[str, Tensor]  # by name in the full model
MAX_NORM, STEPS, SAVED_AT, LR = 0.5, 3, 3, 1e-2
TABLE, NORMS, LINEAR, EXPERTS = "the table", "the weights of norms", "the linear layers", "the experts"
SHAPES = ((70, 50), (33,), (111, 20), (2,))  # of milestone 3: 5,755 numbers, odd on 2 and on 3 ranks
HYPER = {"lr": LR, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
DIVIDED = "that of a loss that was divided by the microbatches once more"
NUMBERS = sum(prod(shape) for shape in SHAPES)


# milestone 2


def first_gradients(rank: int, world_size: int) -> dict[str, Tensor]:
    """On one process: the gradients of the first step, in full."""
    found = train.reference(DENSE, frozen_corpus(), 1, sequence_length=LENGTH, global_batch=BATCH)
    return dict(found.gradients[0])


def gradients(rank: int, world_size: int, sum_gradients: Any, clip: Any, full: Full) -> Found:
    """The answer's sums after a real backward, then its norm and its clipped gradients."""
    parts = assemble(DENSE, DENSE_PLAN)
    run_microbatches(parts, parts.batch(0))
    slips = _slips_of_sums(parts)
    sum_gradients(parts)
    values = _kinds(parts, lambda name, weight: weight.parameter.grad)
    right = _kinds(parts, lambda name, weight: _part(full[name], weight))
    for name, weight in parts.weights.items():  # a clip is judged on the right gradients
        weight.parameter.grad = _part(full[name], weight).clone()
    slips |= _slips_of_norm(parts)
    norms, scaled, wanted = _clipped(parts, clip, full)
    return Found(values | norms | scaled, right | wanted, slips)


def _clipped(parts: Parts, clip: Any, full: Full) -> tuple[dict[str, Any], dict[str, Any], dict[str, Numbers | None]]:
    """Clip twice, at a bound that is far away and at one that is near."""
    true = sqrt(sum(float(grad.square().sum()) for grad in full.values()))
    norms = {"the norm": Numbers.of(torch.tensor([_number(clip(parts, 100 * true))], dtype=torch.float64))}
    after = _kinds(parts, lambda name, weight: weight.parameter.grad)
    scaled: dict[str, Any] = {f"below the bound, {kind}": value for kind, value in after.items()}
    clip(parts, MAX_NORM)
    after = _kinds(parts, lambda name, weight: weight.parameter.grad)
    scaled |= {f"clipped, {kind}": value for kind, value in after.items()}

    wanted: dict[str, Numbers | None] = {"the norm": Numbers.of(torch.tensor([true], dtype=torch.float64))}
    for label, factor in (("below the bound", 1.0), ("clipped", min(1.0, MAX_NORM / (true + 1e-6)))):
        scale = torch.tensor(factor, dtype=torch.float64)
        right = _kinds(parts, partial(_scaled_part, full, scale))
        wanted |= {f"{label}, {kind}": value for kind, value in right.items()}
    return norms, scaled, wanted


def _slips_of_sums(parts: Parts) -> dict[str, dict[str, Numbers | None]]:
    """What typical mistakes make of the gradients; the answer has not run yet."""
    raw = {name: weight.parameter.grad.clone() for name, weight in parts.weights.items()}
    summed = {name: _summed(grad, parts, "dp") for name, grad in raw.items()}
    over_tp = {name: _summed(grad, parts, "tp") for name, grad in summed.items()}
    table = next(name for name in raw if _kind(name) == TABLE)
    both = _summed(raw[table], parts, "pp")
    found: dict[str, dict[str, Numbers | None]] = {}
    for kind in (TABLE, NORMS, LINEAR):
        found[kind] = {
            "as the backward left it on this rank; nothing was summed over dp": _flat(raw, kind),
            "summed over tp as well, whose ranks hold other shards or have the same gradient": _flat(over_tp, kind),
        }
    found[TABLE] = {
        "the gradient of one of its two uses; the first stage has that of the embedding, the last stage that of the "
        "head, and both belong to one weight": _flat(summed, TABLE),
        "both uses of the table, but of this data rank's sequences alone": Numbers.of(both.flatten()),
        "as the backward left it on this rank": _flat(raw, TABLE),
    }
    return found


def _slips_of_norm(parts: Parts) -> dict[str, dict[str, Numbers | None]]:
    """What typical mistakes make of the norm: this rank's own, and copies that count more than once."""
    squares = {TABLE: 0.0, NORMS: 0.0, LINEAR: 0.0}
    for name, weight in parts.weights.items():
        squares[_kind(name)] += float(weight.parameter.grad.square().sum())
    here = torch.tensor([squares[kind] for kind in (TABLE, NORMS, LINEAR)], dtype=torch.float64)
    world = here.clone()
    comm.all_reduce(world)
    copies = parts.plan.dp  # of everything
    table, norms, linear = (float(value) / copies for value in world)
    tp = parts.plan.tp
    known = {
        "of this rank's own parameters alone": float(here.sum()),
        "with every copy counted: the ranks of dp hold the same gradients": float(world.sum()),
        "with weights of norms counted once per rank of tp, which all hold the same": table / 2 + norms + linear,
        "with the tied table counted on both of its stages": table + norms / tp + linear,
        "with two copies too many: weights of norms along tp, and the tied table along pp": table + norms + linear,
        "squared": table / 2 + norms / tp + linear,
    }
    return {
        "the norm": {
            words: Numbers.of(torch.tensor([value if words == "squared" else sqrt(value)], dtype=torch.float64))
            for words, value in known.items()
        }
    }


# milestone 3


def optimizer(rank: int, world_size: int, make: Any) -> Found:
    """Three steps of the answer's optimizer, on parameters whose gradients are summands."""
    memory = MemoryMeter()
    weights = [nn.Parameter(_draw(shape, f"weight {i}")) for i, shape in enumerate(SHAPES)]
    state = make(weights, comm.new_group(range(world_size)), *HYPER.values())
    num_bytes = sum(weight.nbytes for weight in weights)
    meter, sent, held = Meter(), 0, 0
    for step in range(STEPS):
        for i, weight in enumerate(weights):
            weight.grad = _draw(weight.shape, f"gradient {i} {step} {rank}")
        meter.lap()
        state.step()
        sent = max(sent, meter.lap().bytes)
        for weight in weights:
            weight.grad = None
        held = max(held, memory.grown() - num_bytes)
    expected, slips = _adam(world_size), _adam(world_size, is_corrected=False)
    mean = _adam(world_size, scale=1 / world_size)
    values = {"the vector of weights": _joined([weight.detach() for weight in weights])}
    known = {
        "those of moments without their corrections 1 - beta^t, which matter most in the first steps": _joined(slips),
        "those of averaged gradients; the summands add up to the gradient": _joined(mean),
    }
    right = {"the vector of weights": _joined(expected)}
    return Found(values, right, {"the vector of weights": known}, {"sent": sent, "held": held})


def _adam(world_size: int, is_corrected: bool = True, scale: float = 1.0) -> list[Tensor]:
    """The weights of one process after the steps."""
    weights = [nn.Parameter(_draw(shape, f"weight {i}")) for i, shape in enumerate(SHAPES)]
    reference = torch.optim.AdamW(weights, **HYPER, foreach=False)
    state = [[torch.zeros_like(weight), torch.zeros_like(weight)] for weight in weights]
    (beta, gamma), lr = (0.9, 0.95), LR
    for step in range(STEPS):
        for i, weight in enumerate(weights):
            summands = [_draw(weight.shape, f"gradient {i} {step} {rank}") for rank in range(world_size)]
            weight.grad = scale * torch.stack(summands).sum(0)
        if is_corrected:
            reference.step()
            continue
        with torch.no_grad():
            for weight, (first, second) in zip(weights, state, strict=True):
                assert weight.grad is not None
                weight *= 1 - lr * HYPER["weight_decay"]  # type: ignore[operator]
                first.lerp_(weight.grad, 1 - beta)
                second.lerp_(weight.grad.square(), 1 - gamma)
                weight -= lr * first / (second.sqrt() + HYPER["eps"])
    return [weight.detach() for weight in weights]


# milestone 5


def uninterrupted(rank: int, world_size: int, starts: Any) -> tuple[list[float], dict[str, Tensor]]:
    """On one process: losses and weights of the training that nothing interrupts, on the answer's sequences."""
    from dualpipe_lab.models import PlainLlama
    from dualpipe_lab.tp import initialize_parameters

    model = PlainLlama(SAVED, torch.float64)
    initialize_parameters(model, 0)
    adam, losses = torch.optim.AdamW(model.parameters(), lr=LR, foreach=False, fused=False), []
    for step in range(SAVED_AT + STEPS):
        ids, targets = windows(starts(step, 0, 1))
        adam.zero_grad()
        loss = model.loss(ids, targets)
        loss.backward()
        adam.step()
        losses.append(float(loss.detach()))
    return losses, {name: weight.detach() for name, weight in model.named_parameters()}


def windows(starts: list[int]) -> tuple[Tensor, Tensor]:
    """The sequences that begin at some bytes of the text, and their targets: `ids_BS`, `targets_BS`."""
    text = frozen_corpus()
    rows = torch.tensor([list(text[start : start + LENGTH + 1]) for start in starts])
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def train_and_save(rank: int, world_size: int, starts: Any, save: Any, folder: str) -> list[float]:
    """Train some steps under the first plan, then save; the losses."""
    parts = assemble(SAVED, SAVED_ON, LR)
    losses = [_step(parts, starts, step) for step in range(SAVED_AT)]
    save(folder, SAVED_AT, parts)
    return losses


def resume(rank: int, world_size: int, starts: Any, load: Any, folder: str) -> tuple[Any, list[float], dict[str, Any]]:
    """Load under the second plan and go on: the step that was loaded, the losses, this rank's weights."""
    parts = assemble(SAVED, RESUMED_ON, LR)
    first = load(folder, parts)
    if type(first) is not int:
        return first, [], {}
    losses = [_step(parts, starts, step) for step in range(first, SAVED_AT + STEPS)]
    return first, losses, {name: weight.parameter.detach().tolist() for name, weight in parts.weights.items()}


def _step(parts: Parts, starts: Any, step: int) -> float:
    """A training step on the answer's sequences, summed over dp, without a clip; the loss of all ranks."""
    plan = parts.plan
    ids, targets = windows(starts(step, parts.mesh.rank("dp"), plan.dp))
    count = plan.num_microbatches
    batch = Batch(list(ids.chunk(count)), list(targets.chunk(count)), BATCH * LENGTH, BATCH)
    parts.adam.zero_grad()
    loss = run_microbatches(parts, batch)
    dp.all_reduce_gradients(parts.model.parameters(), parts.mesh.group("dp"))
    parts.adam.step()
    comm.all_reduce(loss)
    return float(loss) / plan.tp  # the ranks of tp have the same one


# milestone 6


def one_process(rank: int, world_size: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """On one process: losses, norms and weights of the steps."""
    options: dict[str, Any] = {"sequence_length": LENGTH, "global_batch": BATCH, "bias_speed": 0.0}
    options |= {"lr": LR, "max_norm": MAX_NORM}
    found = train.reference(SPARSE, frozen_corpus(), STEPS, **options)
    norms = [float(norm) for norm in found.norms if norm is not None]
    return list(found.losses), norms, dict(found.state or {})


def steps(rank: int, world_size: int, step: Any, known: tuple[list[float], list[float], Full]) -> Found:
    """Some whole steps of the answer, with experts: loss, norm, weights, and the bytes of the last."""
    parts = assemble(SPARSE, SPARSE_PLAN, LR)
    slips = _slips_of_groups(parts)
    losses, norms, meter = [], [], Meter()
    for batch in [parts.batch(number) for number in range(STEPS)]:
        before = _loads(parts)
        meter.lap()
        loss, norm = step(parts, batch, MAX_NORM)
        sent = meter.lap().bytes
        losses.append(_number(loss))
        norms.append(_number(norm))
    found, expected = _numbered(losses, norms), _numbered(known[0], known[1])
    slips["loss of step 1"] = {DIVIDED: Numbers.of([known[0][0] / parts.plan.num_microbatches])}
    values = _kinds(parts, lambda name, weight: weight.parameter.detach())
    right = _kinds(parts, lambda name, weight: _part(known[2][name], weight))
    routing = _routing(parts, before)
    budget = _budget(routing, rank)
    return Found(found | values, expected | right, slips, {"over": sent - budget, "sent": sent, "budget": budget})


def _slips_of_groups(parts: Parts) -> dict[str, dict[str, Numbers | None]]:
    """What typical mistakes make of the first norm, from a backward of the first batch that leaves nothing behind."""
    run_microbatches(parts, parts.batch(0))
    raw = {name: weight.parameter.grad.clone() for name, weight in parts.weights.items()}
    parts.adam.zero_grad()
    ep, dp_size = parts.plan.ep, parts.plan.dp
    choices: list[tuple[str, ...]] = [("dp",), ("dp", "ep")]
    data = {axes: {name: _summed(grad, parts, *axes) for name, grad in raw.items()} for axes in choices}

    def norm(dense: float, experts: float, axes: tuple[str, ...] = ("dp",)) -> Numbers | None:
        total = torch.zeros((), dtype=torch.float64)
        for name in raw:
            is_expert = _kind(name) == EXPERTS
            grad = data[axes if is_expert else ("dp", "ep")][name]
            total += grad.square().sum() * (experts if is_expert else dense)
        comm.all_reduce(total)
        return Numbers.of([float(total.sqrt())])

    once = 1 / (dp_size * ep), 1 / dp_size  # a rank's share of the count: every element of the model counts once
    count = parts.plan.num_microbatches
    known = {
        DIVIDED: norm(once[0] / count**2, once[1] / count**2),
        "with the gradients of different experts summed: the ranks of ep hold other experts": norm(*once, ("dp", "ep")),
        "with the experts counted once per rank of dp, which hold copies": norm(once[0], 1.0),
        "with the dense parameters counted once per rank of ep, which hold copies": norm(once[1], once[1]),
        "with every copy counted": norm(1.0, 1.0),
    }
    return {"norm of step 1": known}


def _loads(parts: Parts) -> dict[int, Tensor]:
    """How many tokens each router has sent to each expert so far, by layer."""
    found = {}
    for stage in parts.model.stages.values():
        for name, module in stage.named_modules():
            if name.endswith("router"):
                found[int(name.split(".")[1])] = module.load.clone()
    return found


def _routing(parts: Parts, before: dict[int, Tensor]) -> dict[tuple[int, int], list[int]]:
    """The loads of the last step, by rank and layer."""
    mine = {layer: (load - before[layer]).tolist() for layer, load in _loads(parts).items()}
    every = comm.all_gather_object(mine)
    return {(rank, layer): load for rank, loads in enumerate(every) for layer, load in loads.items()}


def _budget(routing: dict[tuple[int, int], list[int]], rank: int) -> int:
    """The plan's own prediction of a rank's bytes, and a few for the log."""
    predicted = SPARSE_PLAN.traffic(SPARSE, BATCH, LENGTH, routing)
    parts = ("layers", "pipeline", "gradients", "norm")
    return sum(predicted.sent(rank, part) for part in parts) + LOG_BYTES


# what they share


def _kind(name: str) -> str:
    if name.startswith("embedding"):
        return TABLE
    if ".experts." in name:
        return EXPERTS
    return NORMS if "norm" in name else LINEAR


def _kinds(parts: Parts, value: Callable[[str, Weight], Tensor | None]) -> dict[str, Numbers | None]:
    """A value of every parameter, together for each kind; None where a parameter of the kind has none."""
    tensors: dict[str, list[Tensor | None]] = {kind: [] for kind in (TABLE, NORMS, LINEAR, EXPERTS)}
    for name, weight in parts.weights.items():
        tensors[_kind(name)].append(value(name, weight))
    return {kind: _joined(found) if found else None for kind, found in tensors.items()}


def _joined(tensors: "list[Tensor] | list[Tensor | None]") -> Numbers | None:
    found = [tensor.detach().flatten() for tensor in tensors if tensor is not None]
    return None if len(found) < len(tensors) or not found else Numbers.of(torch.cat(found))


def _flat(tensors: Mapping[str, Tensor], kind: str) -> Numbers | None:
    return _joined([tensor for name, tensor in tensors.items() if _kind(name) == kind])


def _part(full: Tensor, weight: Weight) -> Tensor:
    return full if weight.shard is None else weight.shard.of(full)


def _scaled_part(full: Full, scale: Tensor, name: str, weight: Weight) -> Tensor:
    return _part(full[name], weight) * scale


def _summed(tensor: Tensor, parts: Parts, *axes: str) -> Tensor:
    total = tensor.clone()
    comm.all_reduce(total, group=parts.mesh.group(*axes))
    return total


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")


def _numbered(losses: list[float], norms: list[float]) -> dict[str, Numbers | None]:
    pairs = enumerate(zip(losses, norms, strict=True), 1)
    both = [((f"loss of step {i}", loss), (f"norm of step {i}", norm)) for i, (loss, norm) in pairs]
    return {name: Numbers.of([value]) for step in both for name, value in step}


def _draw(shape: Any, name: str) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64)
