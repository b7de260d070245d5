"""Random numbers of ranks: equal where activations are copies, different where they are not.

Chapter: book/whole/training.  In: a seed, a step, a rank's coordinates.  Out: the state of torch's own generators.
Ranks of tp that drop other units of one copy no longer hold copies: their norms get gradients of two models.  Data
ranks that drop the same units make fewer masks than there are sequences.
The state follows from seed, step and coordinates, so a run that is resumed draws the same without a saved state.
Elsewhere: Megatron `model_parallel_cuda_manual_seed` (seed + 100 pp_rank; data ranks draw the same unless
`--data-parallel-random-init`) and `CudaRNGStatesTracker`; torch `OffsetBasedRNGTracker`.
"""

import random
from collections.abc import Mapping
from hashlib import blake2b

import torch

from dualpipe_lab.topology import RankCoordinates


def seed_ranks(seed: int, here: RankCoordinates, step: int = 0) -> None:
    """Seed Python's and torch's generators: ranks of a tp group draw the same numbers, all others draw different ones.

    Args:
        seed: of the run.
        here: this rank's coordinates, such as a `Mesh`.
        step: of the training; the numbers of a step do not depend on the steps before.
    """
    chosen = seed_of(seed, {axis: number for axis, number in here.coordinates.items() if axis != "tp"}, step)
    random.seed(chosen)
    torch.manual_seed(chosen)


def seed_of(seed: int, coordinates: Mapping[str, int], step: int = 0) -> int:
    """Return a seed of 64 bits for a rank; an axis of size 1 may be left out.

    Sums such as seed + 100 pp_rank + tp_rank give one seed to two ranks, or to ranks of two runs; this does not.
    """
    places = sorted((axis, number) for axis, number in coordinates.items() if number)
    return int.from_bytes(blake2b(repr((seed, step, places)).encode(), digest_size=8).digest(), "little")
