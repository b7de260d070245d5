"""Orders of 1F1B for MoE layers: serial, overlapped, and an unpaired forward or backward.

Chapters: book/ep/one-f-one-b-basic, book/ep/one-f-one-b-overlap.  In: a number of layers.  Out: an `Order`.
  basic      one operation after the other: time = total compute + total communication
  overlap    per layer, compute M_B M_W M_F A_B A_W A_F beside comm D_F D_B C_F C_B: time = the larger total plus
             a short start or end
Elsewhere: DeepSeek-V3 figure 4 and its published trace; Megatron `combined_1f1b`,
switched on by `--overlap-moe-expert-parallel-comm`.
Source: DeepSeek-AI 2024 (arXiv 2412.19437), section 3.2.1.
"""

from dualpipe_lab.ep.overlap.order import Op, Order


def one_f_one_b_basic(num_layers: int, forward: int = 1, backward: int = 0) -> Order:
    """Return the forward of one microbatch, then the unsplit backward of another.

    >>> print(one_f_one_b_basic(1))
    1F1B basic
      compute  A_F0 M_F0 M_BW0 A_BW0
      comm     D_F0 C_F0 C_B0 D_B0
    """
    _check(num_layers)
    first, second = forward_alone(num_layers, forward), backward_alone(num_layers, backward, split=False)
    return Order("1F1B basic", first.compute + second.compute, first.comm + second.comm, forward, backward)


def one_f_one_b_overlap(
    num_layers: int,
    forward: int = 1,
    backward: int = 0,
    split: bool = True,
    backward_layers: int | None = None,
) -> Order:
    """Return the overlapped pair: forward layer i runs beside backward layer L - 1 - i.

    Args:
        num_layers: layers of the forward.
        forward: its microbatch.
        backward: the microbatch of the backward.
        split: whether weight gradients are separate operations, which fill the windows.
        backward_layers: layers of the backward, if its stage has another number; the longer half continues alone.

    >>> print(one_f_one_b_overlap(2))
    1F1B overlap
      compute  A_F0 M_B1 M_W1 M_F0 A_B1 A_W1 A_F1 M_B0 M_W0 M_F1 A_B0 A_W0
      comm     C_B1 D_F0 D_B1 C_F0 C_B0 D_F1 D_B0 C_F1
    """
    num_backward = num_layers if backward_layers is None else backward_layers
    _check(num_layers)
    _check(num_backward)
    compute, comm = [Op("A_F", 0)], [Op("C_B", num_backward - 1)]
    for i in range(max(num_layers, num_backward)):
        up, down = i < num_layers, num_backward - 1 - i  # a backward layer that does not exist is negative
        if up:
            comm.append(Op("D_F", i))
        if down >= 0:
            compute += _backward("M", down, split)
            comm.append(Op("D_B", down))
        if up:
            compute.append(Op("M_F", i))
            comm.append(Op("C_F", i))
        if down >= 0:
            compute += _backward("A", down, split)
        if down > 0:
            comm.append(Op("C_B", down - 1))
        if i + 1 < num_layers:
            compute.append(Op("A_F", i + 1))
    return Order("1F1B overlap", tuple(compute), tuple(comm), forward, backward)


def forward_alone(num_layers: int, microbatch: int = 0) -> Order:
    """Return an unpaired forward: all of its communication is exposed.

    >>> print(forward_alone(1))
    forward
      compute  A_F0 M_F0
      comm     D_F0 C_F0
    """
    _check(num_layers)
    compute = [Op(kind, layer) for layer in range(num_layers) for kind in ("A_F", "M_F")]
    comm = [Op(kind, layer) for layer in range(num_layers) for kind in ("D_F", "C_F")]
    return Order("forward", tuple(compute), tuple(comm), forward=microbatch)


def backward_alone(num_layers: int, microbatch: int = 0, split: bool = True) -> Order:
    """Return an unpaired backward; if it is split, its own weight gradients overlap communication.

    >>> print(backward_alone(2))
    backward
      compute  M_B1 M_W1 A_B1 A_W1 M_B0 M_W0 A_B0 A_W0
      comm     C_B1 D_B1 C_B0 D_B0
    """
    _check(num_layers)
    compute, comm = [], []
    for layer in reversed(range(num_layers)):
        compute += _backward("M", layer, split) + _backward("A", layer, split)
        comm += [Op("C_B", layer), Op("D_B", layer)]
    return Order("backward", tuple(compute), tuple(comm), backward=microbatch)


def input_grads_alone(num_layers: int, microbatch: int = 0) -> Order:
    """Return I of a stage: the backward without its weight gradients.

    >>> print(input_grads_alone(1))
    input gradients
      compute  M_B0 A_B0
      comm     C_B0 D_B0
    """
    _check(num_layers)
    compute = [Op(kind, layer) for layer in reversed(range(num_layers)) for kind in ("M_B", "A_B")]
    comm = [Op(kind, layer) for layer in reversed(range(num_layers)) for kind in ("C_B", "D_B")]
    return Order("input gradients", tuple(compute), tuple(comm), backward=microbatch)


def weight_grads_alone(num_layers: int, microbatch: int = 0) -> Order:
    """Return W of a stage: weight gradients alone, without communication.

    >>> print(weight_grads_alone(1))
    weight gradients
      compute  M_W0 A_W0
      comm
    """
    _check(num_layers)
    compute = [Op(kind, layer) for layer in reversed(range(num_layers)) for kind in ("M_W", "A_W")]
    return Order("weight gradients", tuple(compute), (), backward=microbatch)


def _backward(part: str, layer: int, split: bool) -> list[Op]:
    return [Op(f"{part}_B", layer), Op(f"{part}_W", layer)] if split else [Op(f"{part}_BW", layer)]


def _check(num_layers: int) -> None:
    if not isinstance(num_layers, int) or isinstance(num_layers, bool) or num_layers < 1:
        raise ValueError(f"an order needs a whole number of layers from 1, got {num_layers!r}")
