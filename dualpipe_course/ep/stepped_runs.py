"""Layers in steps, for the checks of `steps` and `pair`: as parts run them on ranks, and in plain torch.

Two kinds of layer: a small one, of which every rank has weights of its own and `counts[r][s]` rows travel from rank r
to rank s; and one with attention, a cut MLP and experts.  The references here import no part.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

Counts = tuple[tuple[int, ...], ...]  # rows from each rank to each
Named = dict[str, "Tensor | None"]
WIDTH, WORDS, WORK_MS, TRAVEL_MS = 3, 7, 20, 20
NORMS, COMMON, CUT = ("norm1", "norm2"), ("q", "k", "v", "o", "router"), ("up", "down")
EXPERTS, HEADS, SIZE, HIDDEN, EXPERT_HIDDEN, TOKENS = 8, 2, 8, 8, 5, 3
EVEN, LONE = "tokens for all experts", "all tokens for the first half of the experts"
ROUTE = (3, 4, 2)  # experts of a token, groups, groups that are kept


def draw(seed: int, *shape: int) -> "Tensor":
    """The same numbers for the same seed."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64) / max(shape[-1], 1) ** 0.5


class Small(NamedTuple):
    """Weights of a rank in one stage of small layers.

    Attributes:
        table: rows of an embedding, which the first layer begins with, or None.
        layers: by name, of each layer.
    """

    table: "Tensor | None"
    layers: "list[dict[str, Tensor]]"

    @property
    def leaves(self) -> "dict[str, Tensor]":
        """All weights by name."""
        found = {f"{name} of layer {n}": leaf for n, w in enumerate(self.layers) for name, leaf in w.items()}
        return found if self.table is None else {"the table": self.table} | found


def small_weights(stage: int, rank: int, num_layers: int, has_table: bool) -> Small:
    """Of one rank."""
    seed = 1000 * stage + 100 * rank
    layers = [
        {"first": draw(seed + n, WIDTH, WIDTH), "gate": draw(seed + 10 + n, 1, WIDTH)}
        | {"expert": draw(seed + 20 + n, WIDTH, WIDTH)}
        for n in range(num_layers)
    ]
    found = Small(draw(seed + 30, WORDS, WIDTH) if has_table else None, layers)
    for leaf in found.leaves.values():
        leaf.requires_grad_()
    return found


def small_input(microbatch: int, rank: int, counts: Counts, has_table: bool) -> "Tensor":
    """Of one rank: words or rows."""
    import torch

    num = sum(counts[rank])
    x = draw(5000 + 100 * microbatch + rank, num, WIDTH)
    return (x[:, 0] * 1000).long() % WORDS if has_table else torch.clone(x)


def small_dy(microbatch: int, rank: int, counts: Counts) -> "Tensor":
    """The gradient of a microbatch's output."""
    return draw(7000 + 100 * microbatch + rank, sum(counts[rank]), WIDTH)


def small_steps(
    weights: Small, rank: int, counts: Counts, ranks: list[int], log: list[str], ms: float = 0, name: str = ""
) -> list[Any]:
    """The steps of a stage, which log what they do and let time pass."""
    from mine.steps import Compute, Travel

    me = ranks.index(rank)
    sends, receives = list(counts[me]), [row[me] for row in counts]
    found: list[Any] = []
    for number, w in enumerate(weights.layers):
        table = None if number else weights.table
        first, experts, last = _pieces(w, table, sends, receives)
        works = [
            _timed(f, f"{name}{piece}{number}", log, ms) for f, piece in ((first, "a"), (experts, "b"), (last, "c"))
        ]
        there, back = _sizes("sizes", ranks), _sizes("back", ranks)
        found += [Compute(works[0]), Travel(there), Compute(works[1]), Travel(back), Compute(works[2])]
    return found


def _sizes(key: str, ranks: list[int]) -> Callable[[Mapping[str, Any]], Any]:
    return lambda carry: (*carry[key], ranks)


def _pieces(w: "Mapping[str, Tensor]", table: "Tensor | None", sends: list[int], receives: list[int]) -> Any:
    import torch
    from mine.column import linear

    def first(x: "Tensor", carry: dict[str, Any]) -> Any:
        x = x if table is None else table[x]
        carry = {"rest": x.sin(), "scale": linear(x, w["gate"]).sigmoid(), "unused": x.sum()}
        carry |= {"number": torch.arange(len(x)), "sizes": (sends, receives), "back": (receives, sends)}
        return linear(x, w["first"]), carry

    def experts(rows: "Tensor", carry: dict[str, Any]) -> Any:
        return linear(rows, w["expert"]).tanh(), carry

    def last(rows: "Tensor", carry: dict[str, Any]) -> Any:
        return carry["rest"][carry["number"]] + carry["scale"] * rows, {}

    return first, experts, last


def _timed(f: Callable[..., Any], name: str, log: list[str], ms: float) -> Callable[..., Any]:
    """The same piece of work: its forward and its backward are logged, and take their time."""
    import torch

    from dualpipe_lab.launch.context import compute

    class Watched(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, y: "Tensor") -> "Tensor":
            return y.view_as(y)

        @staticmethod
        def backward(ctx: Any, dy: "Tensor") -> "Tensor":
            log.append(f"B{name}")
            compute(ms)
            return dy

    def watched(x: "Tensor", carry: dict[str, Any]) -> Any:
        log.append(f"F{name}")
        compute(ms)
        y, made = f(x, carry)
        return Watched.apply(y), made

    return watched


def small_layers(stage: int, microbatch: int, counts: Counts, num_layers: int, has_table: bool) -> "list[Named]":
    """In plain torch, for each rank: y and dx of a microbatch, and the gradients of that rank's weights."""
    import torch

    num = len(counts)
    weights = [small_weights(stage, rank, num_layers, has_table) for rank in range(num)]
    given = [small_input(microbatch, rank, counts, has_table) for rank in range(num)]
    if not has_table:
        given = [x.requires_grad_() for x in given]
    xs = [x if w.table is None else w.table[x] for x, w in zip(given, weights, strict=True)]
    for number in range(num_layers):
        ws = [one.layers[number] for one in weights]
        rows = [(x @ w["first"].mT).split(counts[rank]) for rank, (x, w) in enumerate(zip(xs, ws, strict=True))]
        made = [[(rows[r][s] @ ws[s]["expert"].mT).tanh() for s in range(num)] for r in range(num)]
        xs = [
            x.sin() + (x @ w["gate"].mT).sigmoid() * torch.cat(made[rank])
            for rank, (x, w) in enumerate(zip(xs, ws, strict=True))
        ]
    torch.autograd.backward(xs, [small_dy(microbatch, rank, counts) for rank in range(num)])
    return [
        {"y": y.detach(), "dx": None if has_table else x.grad} | {name: leaf.grad for name, leaf in w.leaves.items()}
        for y, x, w in zip(xs, given, weights, strict=True)
    ]


def small_alone(stage: Small, x: "Tensor") -> "Tensor":
    """A stage on one rank, with autograd."""
    for w in stage.layers:
        x = x.sin() + (x @ w["gate"].mT).sigmoid() * (x @ w["first"].mT @ w["expert"].mT).tanh()
    return x


def whole_weights(stage: int) -> dict[str, Any]:
    """Of a layer with attention, an MLP and experts, all of them."""
    seed = 1000 * (stage + 1)
    w: dict[str, Any] = {name: 1 + 0.1 * draw(seed + n, SIZE) for n, name in enumerate(NORMS)}
    w |= {name: draw(seed + 10 + n, SIZE, SIZE) for n, name in enumerate("qkvo")}
    w |= {"router": draw(seed + 20, EXPERTS, SIZE), "bias": 0.3 * draw(seed + 21, EXPERTS)}
    w |= {"up": draw(seed + 22, HIDDEN, SIZE), "down": draw(seed + 23, SIZE, HIDDEN)}
    shapes = {"gates": (EXPERT_HIDDEN, SIZE), "ups": (EXPERT_HIDDEN, SIZE), "downs": (SIZE, EXPERT_HIDDEN)}
    return w | {
        name: [draw(seed + 30 + 10 * n + e, *shape) for e in range(EXPERTS)]
        for n, (name, shape) in enumerate(shapes.items())
    }


def part_of(w: Mapping[str, Any], member: int, size: int, choice: str) -> dict[str, Any]:
    """What one of a group has of a layer; a bias can lead all tokens to the first half of the experts."""
    here = EXPERTS // size
    found = {name: w[name].clone().requires_grad_() for name in (*NORMS, *COMMON)}
    found |= {name: w[name].chunk(size, dim)[member].clone().requires_grad_() for dim, name in enumerate(CUT)}
    for name in ("gates", "ups", "downs"):
        found[name] = [one.clone().requires_grad_() for one in w[name][member * here : (member + 1) * here]]
    return found | {"bias": w["bias"] + (choice == LONE) * _first_half()}


def _first_half() -> "Tensor":
    import torch

    return 10.0 * (torch.arange(EXPERTS) < EXPERTS // 2)


def leaves_of(w: Mapping[str, Any]) -> "dict[str, Tensor]":
    """By name; experts one by one."""
    found: dict[str, Tensor] = {}
    for name, value in w.items():
        if isinstance(value, list):
            found |= {f"{name}[{place}]": leaf for place, leaf in enumerate(value)}
        elif name != "bias":
            found[name] = value
    return found


def expert_layer(stage: int, microbatch: int, size: int, choice: str) -> "list[Named]":
    """In plain torch, for each of a group: y and dx of its tokens, and the gradients of what it has.

    A weight that every rank has is a copy for each here: its gradient is the partial sum of that rank.
    """
    import torch
    from torch.nn.functional import silu

    w = whole_weights(stage)
    own = [part_of(w, member, size, choice) for member in range(size)]
    xs = [layer_input(microbatch, member).requires_grad_() for member in range(size)]
    pairs = list(zip(xs, own, strict=True))
    q, k, v = (
        torch.cat([_norm(x, one["norm1"]) @ one[name].mT for x, one in pairs]).view(-1, HEADS, SIZE // HEADS)
        for name in "qkv"
    )
    scores = torch.einsum("qhd,khd->hqk", q, k) * (SIZE // HEADS) ** -0.5
    hidden = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    out = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v).reshape(len(q), -1)
    mids = [x + part @ one["o"].mT for part, (x, one) in zip(out.split(TOKENS), pairs, strict=True)]
    h = torch.cat([_norm(mid, one["norm2"]) for mid, one in zip(mids, own, strict=True)])
    up, down = torch.cat([one["up"] for one in own]), torch.cat([one["down"] for one in own], 1)
    weights = torch.cat(
        [_weights_of(part @ one["router"].mT, one["bias"]) for part, one in zip(h.split(TOKENS), own, strict=True)]
    )
    gates, ups, downs = (torch.stack([e for one in own for e in one[name]]) for name in ("gates", "ups", "downs"))
    made = silu(torch.einsum("td,efd->tef", h, gates)) * torch.einsum("td,efd->tef", h, ups)
    y = torch.cat(mids) + silu(h @ up.mT) @ down.mT + torch.einsum("tef,edf,te->td", made, downs, weights)
    ys = y.split(TOKENS)
    torch.autograd.backward(ys, [layer_dy(microbatch, member) for member in range(size)])
    return [
        {"y": y.detach(), "dx": x.grad} | {name: leaf.grad for name, leaf in leaves_of(one).items()}
        for y, x, one in zip(ys, xs, own, strict=True)
    ]


def layer_input(microbatch: int, member: int) -> "Tensor":
    """The tokens of one of a group."""
    return 2 * draw(9000 + 100 * microbatch + member, TOKENS, SIZE)


def layer_dy(microbatch: int, member: int) -> "Tensor":
    """The gradient of their output."""
    return draw(9500 + 100 * microbatch + member, TOKENS, SIZE)


def _norm(x: "Tensor", scale: "Tensor") -> "Tensor":
    return scale * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def _weights_of(logits: "Tensor", bias: "Tensor") -> "Tensor":
    """The weight of each expert for each token, 0 for one that it does not choose."""
    import torch

    k, num_groups, num_kept = ROUTE
    scores = logits.sigmoid()
    values = (scores + bias).detach().unflatten(-1, (num_groups, -1))
    worth = values.sort(-1).values[..., -2:].sum(-1)
    is_open = (-worth).argsort(-1).argsort(-1) < num_kept
    chosen = (-values.masked_fill(~is_open[..., None], -torch.inf).flatten(-2)).argsort(-1).argsort(-1) < k
    return scores * chosen / (scores * chosen).sum(-1, keepdim=True)


def added(*runs: "Sequence[Named]") -> "list[Named]":
    """Gradients of one stage after several microbatches, for each rank; y and dx are left out."""
    found: list[Named] = []
    for ranks in zip(*runs, strict=True):
        names = [name for name in ranks[0] if name not in ("y", "dx")]
        found.append({name: sum(_number(one[name]) for one in ranks) for name in names})
    return found


def _number(value: "Tensor | None") -> "Tensor":
    assert value is not None
    return value
