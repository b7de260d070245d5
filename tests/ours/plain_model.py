"""A small model in plain torch on one process, token by token as it is defined; it knows nothing of any part."""

import torch
from torch.nn.functional import cross_entropy, silu

WORDS, WIDTH, HIDDEN, HEADS, EXPERTS, EXPERT_HIDDEN = 11, 8, 12, 4, 8, 6
ROUTE = (3, 4, 2)  # experts of a token, groups of experts, groups that are kept
LR, BETAS, EPS = 3e-2, (0.9, 0.999), 1e-8


def make_layers(num_layers, with_experts=True, seed=0):
    """The weights of every layer by name; the first has the table, the last the norm and the head."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5

    layers = []
    for _ in range(num_layers):
        w = {name: 1 + 0.1 * draw(WIDTH) for name in ("norm1", "norm2")}
        w |= {name: draw(WIDTH, WIDTH) for name in ("q", "k", "v", "o")}
        w |= {"up": draw(HIDDEN, WIDTH), "down": draw(WIDTH, HIDDEN)}
        if with_experts:
            w |= {"router": draw(EXPERTS, WIDTH), "bias": 0.3 * draw(EXPERTS)}
            w |= {name: [draw(EXPERT_HIDDEN, WIDTH) for _ in range(EXPERTS)] for name in ("gates", "ups")}
            w["downs"] = [draw(WIDTH, EXPERT_HIDDEN) for _ in range(EXPERTS)]
        layers.append(w)
    layers[0]["embed"] = draw(WORDS, WIDTH)
    layers[-1] |= {"norm3": 1 + 0.1 * draw(WIDTH), "head": draw(WORDS, WIDTH)}
    return layers


def make_batch(num_microbatches, num_tokens, step=0):
    """Words and the words to be predicted; the last microbatch has none, and others miss some."""
    generator = torch.Generator().manual_seed(100 + step)
    ids, targets = torch.randint(WORDS, (2, num_microbatches, num_tokens), generator=generator)
    targets[:, ::3] = -100
    targets[-1] = -100
    return ids, targets


def leaves(layers):
    """All weights that learn, by layer and name; of experts one by one."""
    found = {}
    for number, w in enumerate(layers):
        for name, value in w.items():
            for place, leaf in enumerate(value if isinstance(value, list) else [value]):
                if name != "bias":
                    found[number, name, place if isinstance(value, list) else None] = leaf
    return found


def train(layers, batches):
    """Adam on the mean over all targets; return the losses, the gradients of the first step, and the weights."""
    weights = leaves(layers)
    for leaf in weights.values():
        leaf.requires_grad_()
    adam = torch.optim.Adam(weights.values(), LR, BETAS, EPS)
    losses, first = [], None
    for ids, targets in batches:
        adam.zero_grad()
        logits = torch.cat([logits_of(layers, sequence) for sequence in ids])
        wanted = targets.flatten()
        loss = cross_entropy(logits, wanted, ignore_index=-100)
        loss.backward()
        for leaf in weights.values():
            leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        first = {name: leaf.grad.clone() for name, leaf in weights.items()} if first is None else first
        adam.step()
        losses.append(float(loss.detach()))
    return losses, first, {name: leaf.detach() for name, leaf in weights.items()}


def logits_of(layers, ids):
    """One sequence."""
    x = layers[0]["embed"][ids]
    for w in layers:
        x = x + attention(rms(x, w["norm1"]), w)
        h = rms(x, w["norm2"])
        x = x + silu(h @ w["up"].T) @ w["down"].T + (experts(h, w) if "router" in w else 0)
    return rms(x, layers[-1]["norm3"]) @ layers[-1]["head"].T


def rms(x, scale):
    return scale * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def attention(x, w):
    size = WIDTH // HEADS
    out = []
    for head in range(HEADS):
        own = slice(head * size, (head + 1) * size)
        q, k, v = (x @ w[name][own].T for name in "qkv")
        scores = q @ k.T / size**0.5
        hidden = torch.arange(len(x))[:, None] < torch.arange(len(x))
        out.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v)
    return torch.cat(out, -1) @ w["o"].T


def experts(h, w):
    k, num_groups, num_kept = ROUTE
    rows = []
    for token in h:
        affinity = (w["router"] @ token).sigmoid()
        scores = (affinity + w["bias"]).detach()
        groups = scores.view(num_groups, -1)
        best = sorted(range(num_groups), key=lambda g: -float(groups[g].sort().values[-2:].sum()))[:num_kept]
        size = len(scores) // num_groups
        open_ones = [e for e in range(len(scores)) if e // size in best]
        chosen = sorted(open_ones, key=lambda e: -float(scores[e]))[:k]
        total = sum(affinity[e] for e in chosen)
        rows.append(
            sum(
                affinity[e] / total * (w["downs"][e] @ (silu(w["gates"][e] @ token) * (w["ups"][e] @ token)))
                for e in chosen
            )
        )
    return torch.stack(rows)
