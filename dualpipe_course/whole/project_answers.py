"""Judging the project's answers that need no rank: a placement of weights, starts of sequences.

Chapter: book/whole/project.  In: what the answer returned.  Out: nothing, or `Wrong` with the first thing that is off.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from math import prod
from typing import Any

from dualpipe_course.plain import plain
from dualpipe_course.whole.project_parts import BATCH, LENGTH
from dualpipe_course.wrong import Wrong
from dualpipe_lab.topology import Topology

Shapes = Mapping[str, tuple[int, ...]]
Pieces = dict[str, tuple[tuple[int, int], ...]]  # by name: start and stop along each dimension
TABLE, BYTES = "embedding.weight", 8
_ROWS, _COLUMNS = ("q", "k", "v", "gate", "up", "embedding"), ("o", "down")


def shapes_of(config: Any) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter of the full model, by name; a tied head has no name of its own."""
    heads = config.num_heads * config.size_of_head, config.num_kv_heads * config.size_of_head
    hidden, ffn = config.hidden_size, config.ffn_size
    found: dict[str, tuple[int, ...]] = {TABLE: (config.vocabulary_size, hidden)}
    for number in range(config.num_layers):
        layer = {
            "attention_norm.weight": (hidden,),
            "attention.q.weight": (heads[0], hidden),
            "attention.k.weight": (heads[1], hidden),
            "attention.v.weight": (heads[1], hidden),
            "attention.o.weight": (hidden, heads[0]),
            "mlp_norm.weight": (hidden,),
            "mlp.gate.weight": (ffn, hidden),
            "mlp.up.weight": (ffn, hidden),
            "mlp.down.weight": (hidden, ffn),
        }
        found |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
    return found | {"norm.weight": (hidden,)}


def check_placement(held: Sequence[object], sizes: Mapping[str, int], shapes: Shapes) -> None:
    """Raise `Wrong` unless these are the weights of each rank, and no rank holds more than it must."""
    topology = Topology(list(sizes.items()))
    ranks = [_pieces(value, rank, shapes) for rank, value in enumerate(held)]
    for rank, pieces in enumerate(ranks):
        twin = topology.rank_at(**(topology.coordinates(rank) | {"dp": 0}))
        if pieces != ranks[twin]:
            raise Wrong(f"ranks {twin} and {rank} differ along dp alone, and hold different weights")
        _check_shards(pieces, rank, topology.coordinates(rank)["tp"], sizes["tp"], shapes)
        first = topology.rank_at(**(topology.coordinates(rank) | {"tp": 0}))
        if set(pieces) != set(ranks[first]):
            raise Wrong(f"ranks {first} and {rank} differ along tp alone, and hold shards of different weights")
    stages = [ranks[topology.rank_at(pp=stage)] for stage in range(sizes["pp"])]
    _check_stages(stages, shapes)
    most, least = max(map(_num_bytes, ranks)), _fewest_bytes(sizes, shapes)
    if most > least:
        rank = [_num_bytes(pieces) for pieces in ranks].index(most)
        raise Wrong(
            f"rank {rank} holds {most:,} bytes, {least:,} are enough: the first stage and the last hold the table too, "
            "so they take fewer layers",
            score=0.6,
        )


def _pieces(value: object, rank: int, shapes: Shapes) -> Pieces:
    if not isinstance(value, dict):
        raise Wrong(f"rank {rank}: expected a dict from names to a slice per dimension, got {type(value).__name__}")
    found: Pieces = {}
    for name, slices in value.items():
        if name not in shapes:
            raise Wrong(f"rank {rank}: the model has no weight {str(name)[:80]!r}")
        shape = shapes[name]
        if not isinstance(slices, (tuple, list)) or [type(part) for part in slices] != [slice] * len(shape):
            raise Wrong(f"rank {rank}: {name} has {len(shape)} dimensions, and needs a slice for each, in a tuple")
        try:
            ranges = [part.indices(size) for part, size in zip(slices, shape, strict=True)]
        except TypeError:
            raise Wrong(f"rank {rank}: the slices of {name} need whole numbers") from None
        if any(step != 1 or stop < start for start, stop, step in ranges):
            raise Wrong(f"rank {rank}: the slices of {name} are no ranges with a step of 1")
        found[name] = tuple((start, stop) for start, stop, _ in ranges)
    return found


def _check_shards(pieces: Pieces, rank: int, tp_rank: int, tp_size: int, shapes: Shapes) -> None:
    for name, found in pieces.items():
        shape = shapes[name]
        axis = {**dict.fromkeys(_ROWS, 0), **dict.fromkeys(_COLUMNS, 1)}.get(name.split(".")[-2])
        expected = [(0, size) for size in shape]
        if axis is not None:
            share = shape[axis] // tp_size
            expected[axis] = tp_rank * share, (tp_rank + 1) * share
        if found != tuple(expected):
            how = "is held in full" if axis is None else f"is cut along dimension {axis}"
            texts = [", ".join(f"{start}:{stop}" for start, stop in ranges) for ranges in (found, expected)]
            raise Wrong(f"rank {rank}, tp {tp_rank} of {tp_size}: [{texts[0]}] of {name}, expected [{texts[1]}]; {how}")


def _check_stages(stages: Sequence[Pieces], shapes: Shapes) -> None:
    held = [sorted({_layer(name) for name in pieces if name.startswith("layers.")}) for pieces in stages]
    num_layers = 1 + max(_layer(name) for name in shapes if name.startswith("layers."))
    if [layer for layers in held for layer in layers] != list(range(num_layers)):
        raise Wrong(
            f"the stages hold layers {held}; every layer of the {num_layers} is on one stage, and the stages have them "
            "in order"
        )
    for number, pieces in enumerate(stages):
        wanted = {name for name in shapes if name.startswith("layers.") and _layer(name) in held[number]}
        wanted |= {TABLE} if number in (0, len(stages) - 1) else set()
        wanted |= {"norm.weight"} if number == len(stages) - 1 else set()
        if missing := sorted(wanted - set(pieces)):
            tied = "; the head uses the embedding's table" if missing == [TABLE] and number else ""
            raise Wrong(f"stage {number} of {len(stages)} lacks {missing[0]}{tied}")
        if extra := sorted(set(pieces) - wanted):
            raise Wrong(f"stage {number} of {len(stages)} holds {extra[0]}, which it does not use")


def _fewest_bytes(sizes: Mapping[str, int], shapes: Shapes) -> int:
    """The bytes of the fullest rank under the best placement, over all of them."""
    num_layers = 1 + max(_layer(name) for name in shapes if name.startswith("layers."))
    tp, stages = sizes["tp"], sizes["pp"]

    def numbers(names: Iterator[str]) -> int:
        return sum(prod(shapes[name]) // (1 if "norm" in name else tp) for name in names)

    layer = numbers(name for name in shapes if name.startswith("layers.0."))
    table, norm = numbers(iter([TABLE])), numbers(iter(["norm.weight"]))

    def most(cuts: tuple[int, ...]) -> int:
        ends = [0, *cuts, num_layers]
        held = [layer * (ends[stage + 1] - ends[stage]) for stage in range(stages)]
        held[0] += table
        held[-1] += norm + (table if stages > 1 else 0)
        return max(held) * BYTES

    return min(map(most, combinations(range(1, num_layers), stages - 1)))


def _num_bytes(pieces: Pieces) -> int:
    return BYTES * sum(prod(stop - start for start, stop in ranges) for ranges in pieces.values())


def _layer(name: str) -> int:
    return int(name.split(".")[1])


def check_starts(
    by_call: Mapping[tuple[int, int, int], Any], again: Mapping[tuple[int, int, int], Any], num: int
) -> None:
    """Raise `Wrong` unless the starts of sequences depend on step and place alone.

    Args:
        by_call: what the answer returned in one process, by (step, data_rank, data_size).
        again: the same for some of the calls, in another process.
        num: bytes of the text.
    """
    found = {call: _starts(value, call, num) for call, value in by_call.items()}
    num_steps = 1 + max(step for step, _, _ in found)
    whole = {step: found[step, 0, 1] for step in range(num_steps)}
    for call, value in again.items():
        if (other := _starts(value, call, num)) != found[call]:
            step = next((number for number, starts in whole.items() if starts[: len(other)] == other), None)
            what = f"what step {step} read" if step is not None else "other sequences"
            raise Wrong(
                f"step {call[0]} in a fresh process reads {what}: after a resume the data repeat or change; "
                "let step and number of the sequence decide, and keep nothing between calls"
            )
    for data_size in sorted({size for _, _, size in found}):
        for step in range(num_steps):
            parts = [start for rank in range(data_size) for start in found[step, rank, data_size]]
            if parts != whole[step]:
                raise Wrong(
                    f"step {step} on {data_size} data ranks reads {parts}, on one {whole[step]}: the ranks together "
                    "read the step's sequences in order, on every plan"
                )
    _check_spread([start for starts in whole.values() for start in starts], whole, num)


def _starts(value: object, call: tuple[int, int, int], num: int) -> list[int]:
    step, rank, size = call
    found = plain(value)
    where = f"starts({step}, {rank}, {size})"
    if not isinstance(found, list) or not all(type(start) is int for start in found):
        raise Wrong(f"{where}: expected a list of whole numbers, got {str(value)[:80]}")
    if len(found) != BATCH // size:
        raise Wrong(f"{where}: {len(found)} sequences; a step has {BATCH}, so that each of {size} data ranks has "
                    f"{BATCH // size}")  # fmt: skip
    if any(not 0 <= start <= num - LENGTH - 1 for start in found):
        raise Wrong(f"{where}: {found}; a sequence and its last target take {LENGTH + 1} of {num:,} bytes")
    return found


def _check_spread(starts: list[int], whole: Mapping[int, list[int]], num: int) -> None:
    if len({tuple(found) for found in whole.values()}) < len(whole):
        raise Wrong("two steps read the same sequences; the step decides, too")
    if len(set(starts)) < 0.9 * len(starts):
        raise Wrong(f"{len(starts)} sequences begin at {len(set(starts))} places; draw each anew")
    if max(starts) - min(starts) < num // 2:
        raise Wrong(f"{len(starts)} sequences lie within {max(starts) - min(starts):,} of {num:,} bytes; draw from all")
