"""Shape inference: which tensors cross each boundary between stages, so that a receiver can allocate its buffers.

Chapter: book/pp/pp-basic.  In: an example of the tensors, or the inputs of a step on the ranks of the first stage.
Out: a `Spec` per boundary: number, shapes, types and names of the tensors.
Elsewhere: Megatron's variable_seq_lengths sends a header with every activation; torch infers shapes in the first step
and refuses others after it; DeepSeek's set_p2p_tensor_shapes is given one shape.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dualpipe_lab.comm import Pending, irecv, isend
from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.runtime.batch import Microbatches
from dualpipe_lab.pp.runtime.p2p import MAX_TENSORS, PipelineP2P
from dualpipe_lab.pp.runtime.stage import Tensors, as_tensors, names_of
from dualpipe_lab.pp.validation.rules import Route, routes

Spec: TypeAlias = tuple[tuple[tuple[int, ...], torch.dtype, str], ...]  # shape, type and name of each tensor
Example: TypeAlias = Tensor | Tensors | Mapping[str, Tensor]
Boundary: TypeAlias = Example | Callable[[int], Example]

_SIGNATURE_BITS, _DIGEST_BITS = 20, 21  # of a number of 63: a signature, digests of inputs and targets
_MAX_DIMS = 8
_FIELDS = 2 + _MAX_DIMS  # type, number of dimensions, dimensions
_NAME_BYTES = 128  # for all names of a boundary together
_NAMES = 1 + MAX_TENSORS * _FIELDS  # where they begin
HEADER_LENGTH = _NAMES + _NAME_BYTES // 8
_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8,
          torch.bool, torch.complex64, torch.complex128, torch.int8, torch.int16)  # fmt: skip


def spec_of(tensors: Tensors) -> Spec:
    """Return shapes, types and names of tensors; a plain tuple has empty names."""
    return tuple((tuple(x.shape), x.dtype, name) for x, name in zip(tensors, names_of(tensors), strict=True))


def gradients_of(spec: Spec) -> Spec:
    """Return shapes and types of the gradients that come back: integers have none."""
    return tuple((shape, dtype, "") for shape, dtype, _ in spec if dtype.is_floating_point or dtype.is_complex)


def write(spec: Spec) -> str:
    """Write a spec for a message: `(3, 4) of torch.float64`, with its name in front where it has one."""
    return ", ".join(f"{name} {shape} of {dtype}".lstrip() for shape, dtype, name in spec)


def to_header(spec: Spec) -> Tensor:
    """Return a spec as a tensor of `HEADER_LENGTH` integers; ValueError if the spec is too large for one."""
    if len(spec) > MAX_TENSORS or any(len(shape) > _MAX_DIMS or dtype not in _TYPES for shape, dtype, _ in spec):
        raise ValueError(
            f"a boundary carries at most {MAX_TENSORS} tensors of at most {_MAX_DIMS} dimensions, got {write(spec)}"
        )
    names = "\n".join(name for *_, name in spec).encode()
    if len(names) > _NAME_BYTES:
        raise ValueError(
            f"the names at a boundary have at most {_NAME_BYTES} bytes together, got {len(names)} in {write(spec)}; "
            "use shorter ones, or a tuple"
        )
    header = torch.zeros(HEADER_LENGTH, dtype=torch.int64, device="cpu")
    header[0] = len(spec)
    for number, (shape, dtype, _) in enumerate(spec):
        fields = torch.tensor([_TYPES.index(dtype), len(shape), *shape], device="cpu")
        header[1 + number * _FIELDS :][: len(fields)] = fields
    header[_NAMES:].view(torch.uint8)[: len(names)] = torch.tensor(list(names), dtype=torch.uint8, device="cpu")
    return header


def from_header(header: Tensor) -> Spec:
    """Return the spec that `to_header` wrote.

    >>> from_header(to_header((((3, 4), torch.float32, "x"),)))
    (((3, 4), torch.float32, 'x'),)
    """
    count, *fields = header.tolist()
    names = bytes(header[_NAMES:].view(torch.uint8).tolist()).rstrip(b"\0").decode().split("\n")
    tensors = [fields[number * _FIELDS : (number + 1) * _FIELDS] for number in range(count)]
    return tuple(
        (tuple(shape[:dims]), _TYPES[dtype], name)
        for (dtype, dims, *shape), name in zip(tensors, names, strict=False)  # no tensors have one empty name
    )


class GivenShapes:
    """Specs as the caller gives them: one example for all boundaries, or a function from the microbatch to one."""

    def __init__(self, boundary: Boundary) -> None:
        self._boundary = boundary
        self._constant = None if callable(boundary) else _spec_of_example(boundary)

    def begin_step(self, batch: Microbatches) -> None:
        """Do nothing: the specs do not depend on the batch."""

    def known_spec(self, stage: int, microbatch: int) -> Spec:
        """Return the spec of the activations that every stage sends."""
        if self._constant is None:
            assert callable(self._boundary)
            return _spec_of_example(self._boundary(microbatch))
        return self._constant

    receive_spec = known_spec  # without a message

    def check_spec(self, stage: int, microbatch: int, spec: Spec) -> None:
        """Raise ValueError for a spec for which the receiver has no buffer."""
        if spec != (known := self.known_spec(stage, microbatch)):
            raise ValueError(
                f"stage {stage} made {write(spec)} for microbatch {microbatch}, the boundary says {write(known)}; "
                "leave out `boundary` to have it inferred"
            )

    send_spec = check_spec  # without a message


def _spec_of_example(example: Example) -> Spec:
    return spec_of(as_tensors("boundary", example, "be"))


class _Direction:
    """The microbatches that take one route, and their signatures in this step."""

    def __init__(self, route: Route, microbatches: list[int], rank: int) -> None:
        self.microbatches = microbatches
        self.is_first, self.is_on = route[0] == rank, rank in route
        self.is_last = route[-1] == rank != route[0]
        self.ends = route[0], route[-1]
        self.parent = route[route.index(rank) - 1] if self.is_on else rank
        arrivals = [route.index(other) for other in sorted(set(route[1:]) - {route[0]})]
        self.children = [route[stage] for stage in arrivals if route[stage - 1] == rank]
        self.numbers: dict[Any, int] = {}  # on the first rank: shapes of an input -> signature
        self.signatures: dict[int, int] = {}  # microbatch -> signature
        self.receive: Pending[list[int]] | None = None  # the signatures that the parent sends
        self.digests = (0, 0)  # of the inputs and targets of the first microbatch, on the first and the last rank

    def check_digests(self, sent: int) -> None:
        """Raise ValueError if the rank of the first stage has read other inputs, or other targets."""
        targets, inputs = divmod(sent, 1 << _DIGEST_BITS)
        for what, theirs, ours in zip(("inputs", "targets"), (inputs, targets), self.digests, strict=True):
            if theirs and ours and theirs != ours:
                first, last = self.ends
                raise ValueError(
                    f"ranks {first} and {last} of the pipeline have other {what} for microbatch "
                    f"{self.microbatches[0]}, and would train on the inputs of one batch and the targets of another; "
                    "let all ranks of a pipeline read one batch (DataLoader(shuffle=True) draws from "
                    "generator=torch.Generator().manual_seed(...), the same on each), or leave out what a rank does "
                    "not read"
                )


class InferredShapes:
    """Specs that the two ranks of a boundary exchange.

    A signature is a number for the shapes that enter the first stage; equal shapes have one number.  The spec of one
    signature behind one stage is sent once, as a header, before the first activation of that signature.  Both are small
    and read by the host, so they travel between CPUs, on GLOO, also where activations travel on NCCL.  The first
    signature of a direction carries digests of its inputs and targets: the rank of the last stage compares them.
    """

    def __init__(self, program: Program, rank: int, p2p: PipelineP2P) -> None:
        self._p2p, self._rank = p2p, rank
        taken = routes(program)
        self._directions = [
            _Direction(route, [m for m, other in enumerate(taken) if other == route], rank)
            for route in sorted(set(taken))
        ]
        self._direction_of = {m: number for number, one in enumerate(self._directions) for m in one.microbatches}
        self._route_of = dict(enumerate(taken))
        self._specs: dict[tuple[int, int, int], Spec] = {}  # by stage, direction, signature

    def begin_step(self, batch: Microbatches) -> None:
        """Send the signatures of this step's microbatches, or launch the receive of them.

        Shapes may change from step to step, so a message passes ahead of the first activation of every step.
        """
        for number, direction in enumerate(self._directions):
            direction.signatures.clear()
            if direction.is_first:
                shapes = [batch.input_shapes(microbatch) for microbatch in direction.microbatches]
                numbers = direction.numbers
                signatures = [numbers.setdefault(one, len(numbers)) for one in shapes]
                inputs, targets = batch.digests(direction.microbatches[0], _DIGEST_BITS)
                signatures[0] |= (inputs | targets << _DIGEST_BITS) << _SIGNATURE_BITS
                self._store_and_pass_on(number, signatures)
            elif direction.is_on:
                if direction.is_last:
                    direction.digests = batch.digests(direction.microbatches[0], _DIGEST_BITS)
                buffer = torch.empty(len(direction.microbatches), dtype=torch.int64, device="cpu")
                source = self._p2p.global_ranks[direction.parent]
                receive = irecv(buffer, source, self._p2p.signatures_tag(number), self._p2p.group)
                direction.receive = Pending([receive], buffer.tolist)

    def known_spec(self, stage: int, microbatch: int) -> Spec | None:
        """Return the spec of the activations that `stage` sends; None if this rank does not know it yet."""
        number = self._direction_of[microbatch]
        signature = self._directions[number].signatures.get(microbatch)
        return None if signature is None else self._specs.get((stage, number, signature))

    def receive_spec(self, stage: int, microbatch: int) -> Spec:
        """Return the same; receive the signatures, and the header if this signature is new."""
        key = self._receive_key(stage, microbatch)
        if key not in self._specs:
            header = torch.empty(HEADER_LENGTH, dtype=torch.int64, device="cpu")
            source = self._p2p.global_ranks[self._route_of[microbatch][stage]]
            irecv(header, source, self._p2p.header_tag(stage, microbatch), self._p2p.group).wait()
            self._specs[key] = from_header(header)
        return self._specs[key]

    def send_spec(self, stage: int, microbatch: int, spec: Spec) -> None:
        """Send a header if this signature is new; ValueError if the spec of a known signature has changed."""
        key = self._receive_key(stage, microbatch)
        if key not in self._specs:
            self._specs[key] = spec
            header = to_header(spec)
            tag = self._p2p.header_tag(stage, microbatch)
            target, label = self._route_of[microbatch][stage + 1], f"header {stage}F{microbatch}"
            p2p = self._p2p
            p2p.keep_send(target, isend(header, p2p.global_ranks[target], tag, p2p.group, label))
        elif self._specs[key] != spec:
            raise ValueError(
                f"stage {stage} made {write(spec)} for microbatch {microbatch}, but {write(self._specs[key])} for one "
                "whose input has the same shape; pass `boundary`, a function from the microbatch to an example"
            )

    def _receive_key(self, stage: int, microbatch: int) -> tuple[int, int, int]:
        """Return stage, direction and signature; receive the direction's signatures first and pass them on."""
        number = self._direction_of[microbatch]
        direction = self._directions[number]
        if direction.receive:
            signatures = direction.receive.wait()
            direction.receive = None
            self._store_and_pass_on(number, signatures)
        return stage, number, direction.signatures[microbatch]

    def _store_and_pass_on(self, number: int, signatures: list[int]) -> None:
        """Store the signatures of a direction and send them to the ranks behind this one."""
        direction, p2p = self._directions[number], self._p2p
        message = torch.tensor(signatures, device="cpu")
        digests, signatures[0] = divmod(signatures[0], 1 << _SIGNATURE_BITS)
        if direction.is_last:
            direction.check_digests(digests)
        direction.signatures.update(zip(direction.microbatches, signatures, strict=True))
        for child in direction.children:
            tag = p2p.signatures_tag(number)
            p2p.keep_send(child, isend(message, p2p.global_ranks[child], tag, p2p.group, "signatures"))


BoundaryShapes: TypeAlias = GivenShapes | InferredShapes
