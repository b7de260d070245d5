"""Small models with what goes wrong: odd sizes, tied, frozen and unused parameters; one-process references."""

import torch
from torch import nn

import dualpipe_lab as lab

VOCABULARY, WIDTH = 7, 5  # 7 x 5 = 35 elements: divides among neither 2, 3 nor 4 ranks


class Tiny(nn.Module):
    """A language model of 7 x 5 parameters, whose head is tied to the embedding."""

    def __init__(self, dtype=torch.float64, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape):
            return nn.Parameter((torch.randn(*shape, generator=generator, dtype=torch.float64) / 2).to(dtype))

        self.embedding = draw(VOCABULARY, WIDTH)
        self.hidden = draw(WIDTH, WIDTH)
        self.bias = draw(WIDTH)
        self.frozen = nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=False)
        self.unused = draw(3)
        self.rare = draw(WIDTH)  # used by batches that hold token 6 and by no other

    def forward(self, tokens):
        x = self.embedding[tokens]
        x = x + torch.tanh(x @ self.hidden + self.bias)
        if bool((tokens == 6).any()):
            x = x * self.rare
        return x @ self.embedding.t()


def make_batch(rows=5, length=4, seed=1):
    """Targets of which some do not count; the last row counts nowhere, the first rows hold no token 6."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 6, (rows, length), generator=generator)
    tokens[rows // 2 :, 0] = 6
    targets = torch.randint(0, VOCABULARY, (rows, length), generator=generator)
    targets[torch.rand(rows, length, generator=generator) < 0.3] = -100
    targets[-1] = -100
    return tokens, targets


def grads(module):
    """The gradients that matter, cloned, by name; a parameter that nothing used counts as zeros."""
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


def reference_grads(tokens, targets, **options):
    """Gradients of the mean over all valid tokens, on one process."""
    model = Tiny(**options)
    # `rare` multiplies only the parts that hold token 6, so the reference takes the batch row by row
    losses = [
        nn.functional.cross_entropy(model(x[None])[0], y, reduction="sum") for x, y in zip(tokens, targets, strict=True)
    ]
    (sum(losses) / max(int((targets != -100).sum()), 1)).backward()
    return grads(model)


def row_loss(model, tokens, targets, num_tokens):
    """The loss of some rows, each on its own; no row at all has loss 0 and no gradient."""
    from dualpipe_lab.dp.data_parallel import token_loss

    return sum(
        (token_loss(model(x[None]), y[None], num_tokens) for x, y in zip(tokens, targets, strict=True)), torch.zeros(())
    )


def assert_close(ours, theirs, tolerance=1e-12):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert (ours[name] - value).abs().max() <= tolerance * max(1.0, float(value.abs().max())), name


def launch(fn, world_size, *args, **options):
    """A launch that prints nothing."""
    return lab.launch(fn, world_size, *args, output="collect", **options)
