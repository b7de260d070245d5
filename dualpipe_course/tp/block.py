"""Exercises of "A Llama block": what a layer sends, the end of a step, layers below that learn something else.

Chapter: book/tp/block.  Gradients are judged against one process in float64, messages by the ledger.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dualpipe_course.comparison import Found, Limit, Numbers, Off, check_found, in_words
from dualpipe_course.declared import Implement, Predict, Repair
from dualpipe_course.meter import Meter
from dualpipe_course.switched_off import Without
from dualpipe_course.tp import layers
from dualpipe_course.trial import on_ranks
from dualpipe_course.variants import Known
from dualpipe_course.wrong import Wrong

if TYPE_CHECKING:
    from torch import Tensor

NAMES = ("bytes with all tokens", "bytes with cut tokens", "collectives", "bytes kept")
_BELOW = {"dx": ". What the other ranks found out about these tokens belongs in it, once"}


def _slips(tokens: int, t: int) -> Known:
    size = 8192 * tokens  # bytes of T h numbers
    half = size * (t - 1) // t
    gathered = "inputs of products are gathered again, so a rank keeps its part of them alone"
    return (
        (
            (4 * half, "that is one direction"),
            (8 * size, "of each sum, 2 (t - 1) / t of its bytes leave a rank"),
            (2 * half, "that is one sum; a pair of products has one forward and one backward, and there are two pairs"),
            (10 * half, "that is the number with inputs gathered again"),
        ),
        (
            (8 * half, "that is eight halves; two inputs are gathered once more in the backward"),
            (9 * half, "both pairs gather their input again"),
            (16 * half, "a half of a sum travels once: (t - 1) / t of its bytes"),
        ),
        (
            (4, "those are the sums; with cut tokens each is a reduce-scatter and an all-gather"),
            (8, "those are the halves of four sums; what is gathered again?"),
            (6, "those are the all-gathers alone"),
        ),
        (
            (4 * size, "that is what a rank keeps if it has all tokens"),
            (2 * size / t, "that is two of the four"),
            (2 * size, gathered),
            (2 * size + 2 * size / t, gathered),
        ),
    )


_KEPT = "a rank keeps {found:,} bytes for the backward, {most:,} are enough: its own tokens of the input, not all"

CASES = {  # norms of heads, sequence parallelism
    "all tokens on every rank": (False, False),
    "sequence parallelism": (False, True),
    "all tokens on every rank, with q_norm and k_norm": (True, False),
    "sequence parallelism, with q_norm and k_norm": (True, True),
}


_NORMS = ("attention_norm.weight", "mlp_norm.weight", "norm.weight")
_REPLACED = "is the tensor that it was, and grads has another; the optimizer reads the old one"
_SUMMAND = "is still a partial sum: this rank used the weight for its own tokens or heads"
_COMPLETE = "was complete, and is not any more"


def _step(rank: int, world_size: int, fn: Callable[..., Any]) -> list[Found]:
    import torch

    from dualpipe_lab.launch.mesh import Mesh
    from dualpipe_lab.models.llama import Llama
    from dualpipe_lab.models.llama_config import LlamaConfig
    from dualpipe_lab.models.plain_llama import PlainLlama
    from dualpipe_lab.topology import Topology
    from dualpipe_lab.tp.shard import full_state_dict, shards_of

    found, mesh, ids = [], Mesh(Topology([("tp", world_size)])), torch.arange(16).view(2, 8) * 5 % 12
    for qk_norm, is_cut in CASES.values():
        config = LlamaConfig(12, hidden_size=8, ffn_size=8, num_layers=1, num_heads=4, num_kv_heads=4, qk_norm=qk_norm)
        model = Llama(config, mesh, is_cut, coalesce=True, dtype=torch.float64)
        plain = PlainLlama(config, torch.float64)
        plain.load_state_dict(full_state_dict(model))
        for one in (model, plain):
            one.loss(ids, (ids + 3) % 12).backward()
        grads, shards = {name: value.grad for name, value in model.named_parameters()}, shards_of(model)
        before, originals, meter = {name: Numbers.of(grad) for name, grad in grads.items()}, dict(grads), Meter()
        fn(grads, is_cut)
        spent = meter.lap()
        expected = {name: value.grad for name, value in plain.named_parameters()}
        own = {name: shards[name].of(grad) if name in shards else grad for name, grad in expected.items()}
        values, right = ({name: Numbers.of(of[name]) for name in before} for of in (originals, own))
        partial = [name for name in before if name.endswith(("q_norm.weight", "k_norm.weight") + _NORMS * is_cut)]
        slips = {}
        for name, old in before.items():
            was_right = old is not None and old.equals(right[name])
            known = {_SUMMAND: old} if name in partial else {_COMPLETE: values[name]} if was_right else {}
            slips[name] = {_REPLACED: values[name]} if grads.get(name) is not originals[name] else known
        size = 8 * sum(originals[name].numel() for name in partial)
        costs = {"sent": spent.bytes, "messages": spent.messages, "partial bytes": size}
        found.append(Found(values, right, slips, costs))
    return found


def _judge(results: Sequence[Found], case: str) -> None:
    num_ranks, size = len(results), int(results[0].costs["partial bytes"])
    check_found(results, case, why=_gradient_in_words)
    messages = max(int(found.costs["messages"]) for found in results)
    if messages > (enough := 2 * (num_ranks - 1) * bool(size)):
        raise Wrong(
            f"{case}: {messages} messages per rank; {'one sum of all sends' if size else 'no sum sends'} {enough}"
        )
    needed, sent = 2 * (num_ranks - 1) * size, sum(int(found.costs["sent"]) for found in results)
    if sent != needed:
        raise Wrong(f"{case}: the ranks sent {sent:,} bytes in all; an all-reduce of the partial sums sends {needed:,}")


def _gradient_in_words(off: Off) -> str:
    return f"the gradient of {off.name} {off.slip}" if off.slip else f"the gradient of {in_words(off)}"


def _pair(x: "Tensor", first: "Tensor", second: "Tensor") -> "Tensor":
    return (x @ first.t()).tanh() @ second.t()


def _judge_end_of_step(fn: Callable[..., Any], num_ranks: int) -> None:
    answer = Without(fn, "dualpipe_lab.tp.grads:sum_partial_gradients")
    results = on_ranks(_step, num_ranks, answer, case=f"on {num_ranks} rank(s)")
    for place, name in enumerate(CASES):
        _judge([found[place] for found in results], f"{num_ranks} rank(s), {name}")


def _judge_below(fn: Callable[..., Any]) -> str:
    sizes: tuple[tuple[int, tuple[int, ...], int], ...] = (
        (1, (2, 2), 3), (2, (2, 3), 4), (2, (2, 4, 3), 5), (4, (4, 2), 7), (4, (2, 8, 3), 8), (4, (2, 4, 16), 8),
    )  # fmt: skip
    for num_ranks, shape, wide in sizes:
        shapes = {"x": shape, "first": (wide, shape[-1]), "second": (shape[-1], wide)}
        cuts = {"x": -2, "first": 0, "second": 1}
        case = layers.Case(num_ranks, shapes, cuts, shape, -2, counts_kept=True)
        answer, size = Without(fn, *layers.LIBRARY), layers.num_bytes(shape)
        why = "A rank keeps its own tokens of the input, so the backward gathers them once more."
        tokens, own = size // shape[-1] // 8, -(-size // num_ranks)
        most = 2 * 8 * tokens * -(-wide // num_ranks) + 2 * own  # of what is wide, and of this rank's tokens, two each
        limits = [Limit("kept bytes", most, _KEPT, scope="largest")] if num_ranks > 2 else []
        back = size * 3 // 2
        layers.check_layer(answer, _pair, case, forward=size, backward=back, because=why, hints=_BELOW, limits=limits)
    return f"outputs and all gradients equal one process in {len(sizes)} cases, and only a rank's own tokens are kept"


numbers = Predict(
    "block-1",
    "A layer of Llama 3 8B",
    NAMES,
    lambda tokens, t: (65_536 * tokens * (t - 1) // t, 81_920 * tokens * (t - 1) // t, 10, 32_768 * tokens // t),
    "a microbatch {tokens:,} tokens",
    "and {t} ranks share",
    minutes=15,
    points=1,
    trail=True,
    hints=(
        "T h numbers of 2 bytes are 33,554,432 bytes; half a sum of them sends 7/8 of that per rank.",
        "Two pairs, a sum forward and a sum backward each: how many halves? Whose input is gathered twice?",
        "Four inputs of T h numbers, of which each rank keeps its tokens.",
    ),
    slips=_slips,
    tokens=(4096, 1024, 2048, 3072, 5120, 6144, 8192, 16_384),
    t=(8, 2, 4),
    called={"t": "ranks"},
)

end_of_step = Implement(
    "block-2",
    "The end of a step",
    "Write `finish(grads, sequence_parallel)`: afterwards all gradients are those of one process; one message.",
    cases=((1,), (2,), (4,)),
    judge=_judge_end_of_step,
    right=f"all gradients equal one process in {3 * len(CASES)} cases, with one message or none",
    minutes=20,
    points=3,
    hints=(
        "A weight of which a rank has rows or columns has a complete gradient. Which weights do all ranks have?",
        "Of those: does every rank use it for the same tokens and heads? If so, its gradient is complete too.",
        "Norms between the pairs see cut tokens under sequence parallelism only, q_norm and k_norm other heads always.",
    ),
)

below = Repair(
    "block-3",
    "Loss right, layers below wrong",
    "Repair `pair(x, first, second)` between cut tokens, which gathers its input once more and keeps it nowhere.",
    judge=_judge_below,
    minutes=15,
    points=3,
    trail=True,
    hints=(
        "In the forward every rank gets all tokens. With which rows of the first weight does it use them?",
        "So each rank finds a partial sum of the gradient of all tokens, and a slice of one partial sum is no sum. A "
        "row of dW is a sum over all tokens: whose tokens does the backward have?",
        "grad belongs to all tokens. dW needs the input of all tokens, and the backward may gather it; dx is a sum "
        "over the ranks, of which each wants its own tokens.",
    ),
)
