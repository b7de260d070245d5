"""Bytes that tensor parallelism sends, numbers that it holds, and the head counts that it can shard; no torch.

Chapters: book/tp/block, book/tp/gqa.  In: sizes, t ranks.  Out: exact numbers per rank.
All hold for sizes that divide among the ranks; the bytes are then those of the ledger.
Source: Korthikanti et al. 2022 (arXiv 2205.05198), sections 4.1 and 4.2, written for a block without dropout.
"""

from fractions import Fraction


def sum_bytes(num_bytes: int, tp_size: int) -> Fraction:
    """Bytes that a rank sends to all-reduce a tensor of S bytes, or to reduce-scatter and gather it: 2 (t - 1) / t * S.

    >>> sum_bytes(1200, 4)
    Fraction(1800, 1)
    """
    _check_ranks(tp_size)
    return Fraction(2 * (tp_size - 1) * num_bytes, tp_size)


def layer_bytes(
    num_tokens: int,
    hidden_size: int,
    element_bytes: int,
    tp_size: int,
    sequence_parallel: bool = False,
    regather: bool = True,
) -> int:
    """Bytes of activations and their gradients that a rank sends per layer and microbatch: 8 (t - 1) / t * T h beta.

    These are two sums forward and two backward.  Sequence parallelism sends each as a reduce-scatter and a gather, and
    10 in place of 8 where the two inputs of the column-parallel products are gathered again in the backward.

    >>> layer_bytes(128, 64, 4, 2), layer_bytes(128, 64, 4, 2, sequence_parallel=True)
    (131072, 163840)

    Raises:
        ValueError: no rank, or sizes whose bytes do not divide among the ranks.
    """
    halves = 10 if sequence_parallel and regather else 8
    return _integer(sum_bytes(num_tokens * hidden_size * element_bytes, tp_size) * halves / 2)


def norm_bytes(hidden_size: int, element_bytes: int, tp_size: int) -> int:
    """Bytes that a rank sends to sum the weight gradient of one norm, under sequence parallelism.

    >>> norm_bytes(64, 4, 2)
    256
    """
    return _integer(sum_bytes(hidden_size * element_bytes, tp_size))


def kv_bytes(hidden_size: int, head_size: int, num_kv_heads: int, element_bytes: int, tp_size: int) -> int:
    """Bytes that a rank sends to sum dW_k and dW_v over the ranks that hold the same KV head.

    >>> kv_bytes(64, 16, 2, 4, tp_size=4), kv_bytes(64, 16, 4, 4, tp_size=4)
    (8192, 0)
    """
    _check_ranks(tp_size)
    num_replicas = max(tp_size // num_kv_heads, 1)
    return _integer(sum_bytes(2 * hidden_size * head_size * element_bytes, num_replicas))


def cross_entropy_bytes(num_tokens: int, tp_size: int, numbers: int = 3, sum_element_bytes: int = 4) -> int:
    """Bytes that a rank sends for the loss; `numbers` per token: 3, with label smoothing 4.

    >>> cross_entropy_bytes(128, 2)
    1536
    """
    return _integer(sum_bytes(numbers * num_tokens * sum_element_bytes, tp_size))


def gather_ratio(vocabulary_size: int, element_bytes: int, sum_element_bytes: int = 4, numbers: int = 3) -> Fraction:
    """Bytes of gathering the logits, divided by those that the loss sends.

    >>> gather_ratio(32_000, element_bytes=2)
    Fraction(8000, 3)
    """
    return Fraction(vocabulary_size * element_bytes, 2 * numbers * sum_element_bytes)


def layer_parameters(
    hidden_size: int, ffn_size: int, num_heads: int, num_kv_heads: int, head_size: int, tp_size: int
) -> int:
    """Parameters of one layer that a rank holds: (2 h a d + 3 h f) / t + 2 h d max(a_kv / t, 1), and two norms of h.

    >>> layer_parameters(64, 128, 4, 2, 16, tp_size=1), layer_parameters(64, 128, 4, 2, 16, tp_size=2)
    (36992, 18560)
    """
    _check_ranks(tp_size)
    shared = Fraction(2 * hidden_size * num_heads * head_size + 3 * hidden_size * ffn_size, tp_size)
    heads = max(Fraction(num_kv_heads, tp_size), Fraction(1))
    return _integer(shared + 2 * hidden_size * head_size * heads + 2 * hidden_size)


def layer_kept_numbers(
    sizes: tuple[int, int],
    config: tuple[int, int, int, int, int],
    tp_size: int,
    sequence_parallel: bool = False,
    regather: bool = True,
) -> int:
    """Numbers that one Llama layer keeps for its backward on one rank, weights left out.

    The inputs of two norms and of two products, 4 T h, are sharded where the sequence is.  Between them are q, the
    attention's output, gate and up, T (2 a d + 2 f) / t, and k and v, 2 T d max(a_kv / t, 1).

    Args:
        sizes: sequences and tokens per sequence.
        config: hidden_size, ffn_size, num_heads, num_kv_heads, head_size.
        tp_size: ranks.
        sequence_parallel: as in `TensorParallel`.
        regather: as in `TensorParallel`.

    >>> config = (64, 128, 4, 2, 16)
    >>> [layer_kept_numbers((1, 32), config, 2, *how) for how in ((False,), (True, False), (True,))]
    [15936, 13856, 11808]
    """
    _check_ranks(tp_size)
    (batch, length), (hidden, ffn, heads, kv_heads, head) = sizes, config
    tokens = batch * length
    num_shards = tp_size if sequence_parallel else 1  # of the tokens
    norms = Fraction(2 * tokens * (hidden + 1), num_shards)  # x, and one scale per token
    products = Fraction(2 * tokens * hidden, num_shards if regather else 1)
    inner = Fraction(tokens * (2 * heads * head + 2 * ffn), tp_size)  # q and the output of the heads; gate and up
    shared = 2 * tokens * head * max(Fraction(kv_heads, tp_size), Fraction(1))
    return _integer(norms + products + inner + shared + length * head)  # and the cosines and sines of all positions


def check_heads(
    hidden_size: int, num_heads: int, num_kv_heads: int, tp_size: int, head_size: int | None = None
) -> None:
    """Refuse numbers of heads that cannot be sharded over the ranks."""
    if head_size is None and hidden_size % num_heads:
        raise ValueError(f"hidden_size must divide by num_heads, got {hidden_size} and {num_heads}; or give head_size")
    if (head_size or hidden_size // num_heads) % 2:
        raise ValueError(f"rotary positions need an even head_size, got {head_size or hidden_size // num_heads}")
    if num_heads % num_kv_heads:
        raise ValueError(f"every KV head serves as many query heads, got {num_heads} for {num_kv_heads} KV heads")
    if num_heads % tp_size:
        raise ValueError(f"num_heads must divide among the ranks, got {num_heads} on {tp_size} ranks")
    if num_kv_heads % tp_size and tp_size % num_kv_heads:
        raise ValueError(
            f"KV heads must divide among the ranks, or ranks among KV heads, got {num_kv_heads} heads on {tp_size} "
            "ranks"
        )


def _check_ranks(tp_size: int) -> None:
    if tp_size < 1:
        raise ValueError(f"tensor parallelism has at least 1 rank, got {tp_size}")


def _integer(value: Fraction) -> int:
    if value.denominator != 1:
        raise ValueError(f"{value} is not whole; the closed forms hold for sizes that divide among the ranks")
    return int(value)
