"""Exercises of "Latent attention": what is cached, held and sent, a token that unfolds nothing.

Chapter: book/tp/latent-attention.  Outputs are judged against unfolded keys and values, FLOPs by torch's counter.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from dualpipe_course.comparison import Found, Limit, Numbers, compare_on_ranks
from dualpipe_course.declared import Implement, Predict
from dualpipe_course.tp.layers import draw

if TYPE_CHECKING:
    from torch import Tensor

NAMES = ("numbers cached", "numbers of the weight", "bytes in a backward", "times fewer")
_SLIPS = (
    {
        28: "the key position is needed too, 4 numbers that all heads share",
        60: "the queries' latent is needed for this token's own queries only, and these are never asked for again",
        8: "a latent has no heads: every rank caches all of it",
        208: "that is a cache of keys and values of all heads",
        52: "that is a cache of this rank's keys and values; the latent takes their place",
    },
    {
        4_928: "that is the whole weight; a rank has the rows of its 2 heads",
        672: "values are unfolded by this weight as well",
        1_568: "a key's last 4 features are no product: they are the key position, the same for all heads",
        1_408: "the weight multiplies the latent alone, 28 numbers",
    },
    {
        1_344: "an all-reduce sends 2 (t - 1) / t of the bytes; on 4 ranks these are 3/2",
        2_304: "a step's forward sends y; the backward sends the gradients of what all heads use",
        1_872: "the heads of all ranks use the key position too",
        504: "count bytes: a float32 has 4",
        1_008: "what is sent passes twice: as a partial sum, and finished",
    },
    {
        2: "a ring of tokens has all 8 heads on each rank",
        6: "values are filled up to the size of keys: 8 heads of 16 + 16",
        4: "keys travel, and values too",
    },
)


class Case(NamedTuple):
    """Heads, content, position and value features, the latent, and tokens in the cache."""

    heads: int
    content: int
    position: int
    value: int
    rank: int
    tokens: int

    def __str__(self) -> str:
        return (
            f"{self.heads} head(s) of {self.content} + {self.position} features, values of {self.value}, "
            f"latents of {self.rank}, {self.tokens} token(s)"
        )

    @property
    def folded(self) -> int:
        """FLOPs of attention that folds the query into each head's rows, and unfolds one sum of latents per head."""
        pairs = self.tokens * (2 * self.rank + self.position)
        return 2 * self.heads * (pairs + self.rank * (self.content + self.value))


CASES = (
    Case(1, 2, 2, 2, 3, 1), Case(2, 3, 2, 4, 5, 6), Case(3, 4, 2, 3, 2, 9), Case(2, 8, 4, 6, 4, 64),
)  # fmt: skip


def _attend(rank: int, world_size: int, fn: Callable[..., Any], case: Case) -> Found:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    features = case.content + case.position
    q, unfold = draw("q", (case.heads, features)), draw("W", (case.heads, case.content + case.value, case.rank))
    cache = draw("c", (case.tokens, case.rank + case.position))
    given = [x.clone() for x in (q, cache, unfold)]
    with FlopCounterMode(display=False) as counter:
        out = fn(*given)
    latent, position = cache.split([case.rank, case.position], -1)
    content, v = (latent @ unfold.transpose(1, 2)).split([case.content, case.value], -1)

    def attended(keys: "Tensor", size: int = features) -> "Tensor":
        weights = ((keys @ q[..., None]).squeeze(-1) / size**0.5).softmax(-1)
        return (weights[:, None] @ v).squeeze(1)

    k = torch.cat((content, position.expand(case.heads, -1, -1)), -1)
    bare = torch.cat((content, torch.zeros_like(position).expand(case.heads, -1, -1)), -1)
    slips = {
        "the positions' part of the scores is missing": attended(bare),
        f"a query has {features} features, and scores are divided by the root of that": attended(k, case.rank),
        f"the root is that of content and position together, {features}": attended(k, case.content),
    }
    same = all(a.equal(b) for a, b in zip(given, (q, cache, unfold), strict=True))
    return Found(
        {"out": Numbers.of(out)},
        {"out": Numbers.of(attended(k))},
        {"out": {words: Numbers.of(value) for words, value in slips.items()}},
        {"FLOPs": counter.get_total_flops()},
        changed="" if same else "an argument has changed; a cache is read by every later token",
    )


def _judge_one_token(fn: Callable[..., Any]) -> str:
    words = (
        "{found:,} FLOPs in matrix products, {most:,} are enough where no cached token is unfolded: fold the query of "
        "each head once, and unfold one sum of latents per head"
    )
    for case in CASES:
        limits = [Limit("FLOPs", case.folded, words)] if case.tokens > 16 else []
        compare_on_ranks(_attend, 1, fn, case, case=str(case), at=": ", limits=limits)
    return f"outputs equal unfolded attention in {len(CASES)} cases, and no cached token is unfolded"


numbers = Predict(
    "latent_attention-1",
    "Eight heads, one latent",
    NAMES,
    lambda tokens, v, queries, keys: (
        keys + 4,
        2 * (12 + v) * keys,
        6 * tokens * (queries + keys + 4),
        256 / (keys + 4),
    ),
    "values have {v}; the queries",
    "latent has {queries} numbers, that of keys and values {keys}.",
    "and {tokens} tokens pass through",
    minutes=8,
    points=1,
    hints=(
        "Later tokens need the latent of keys and values and the key position. Which of them has heads?",
        "A head's rows make 12 + 10 numbers out of 28. Three gradients are all-reduced: of both latents and of the "
        "key position.",
        "An all-reduce over 4 ranks sends 3/2 of its bytes. On a ring of tokens a key has 16 features, and so has a "
        "value, filled up.",
    ),
    slips=_SLIPS,
    tokens=(6, 5, 8, 10),
    v=(10, 8, 12),
    queries=(24, 20, 32, 40),
    keys=(28, 12, 60),
    called={"v": "values"},
)

one_token = Implement(
    "latent_attention-2",
    "A token that unfolds nothing",
    "Write `attend(q, cache, unfold)`: a new token's output from cached latents, with queries folded.",
    judge=_judge_one_token,
    minutes=15,
    points=3,
    hints=(
        "Of a score q . (W c) the part W^T q does not depend on the token: fold the query once per head, then meet "
        "the latents.",
        "The key position is no product: its features meet the query's last ones as they are.",
        "An output is the sum of weights times W_v c. Add up the latents with their weights first, then unfold one sum "
        "per head.",
    ),
)
