"""AdamW by hand, on full parameters and on a flat shard.

Chapter: book/dp/distributed-adam.  In: weights, gradients.  Out: updated weights; two moments per weight.
  m <- b1 m + (1 - b1) g            v <- b2 v + (1 - b2) g^2
  w <- w (1 - lr * decay)           w <- w - lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)      t = 1, 2, ...
  state                             2 numbers per weight; with a master copy of 16-bit weights 3
Without a master copy, stochastic rounding keeps small updates of bf16 weights: the weights are right in the mean.
Every operation is elementwise, so a shard's update is bitwise that of the same elements of the full parameters.
Elsewhere: torch.optim.AdamW; Megatron DistributedOptimizer.
Source: Kingma and Ba 2015 (arXiv 1412.6980), algorithm 1; Loshchilov and Hutter 2019 (arXiv 1711.05101), algorithm 2.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf, sqrt

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Hyperparameters:
    """The hyperparameters of AdamW; a learning-rate schedule multiplies `lr` by a factor.

    Raises:
        ValueError: a number is out of its range.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        numbers = self.lr, self.eps, self.weight_decay
        if not (all(0 <= beta < 1 for beta in self.betas) and all(0 <= number < inf for number in numbers)):
            raise ValueError(
                f"AdamW needs betas in [0, 1), and finite lr, eps and weight_decay of at least 0, got {self}"
            )


_BLOCK = 2**18  # elements: the eight passes of an update then find a shard's numbers in a processor's cache
# takes a parameter's name and value and returns its hyperparameters, such as no weight decay for norms
HyperparametersOf = Callable[[str, nn.Parameter], Hyperparameters]


def adamw_(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    hyperparameters: Hyperparameters,
    lr: float,
) -> None:
    """Update `weight` and its moments in place by one step of AdamW; `step` counts from 1.

    Args:
        weight: any shape; the other tensors have the same.
        grad: the gradient, in the type of the weight.
        exp_avg: running mean of the gradients.
        exp_avg_sq: running mean of their squares.
        step: t of the bias corrections.
        hyperparameters: betas, eps, weight_decay.
        lr: the learning rate of this step.
    """
    beta1, beta2 = hyperparameters.betas
    exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    weight.mul_(1 - lr * hyperparameters.weight_decay)  # decoupled: the decay never enters the moments
    # sqrt(v / c) as sqrt(v) / sqrt(c), and eps outside of the root
    denominator = exp_avg_sq.sqrt().div_(sqrt(1 - beta2**step)).add_(hyperparameters.eps)
    weight.addcdiv_(exp_avg, denominator, value=-lr / (1 - beta1**step))


def stochastic_round(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Round fp32 to bf16, up with the probability that makes the mean exact.

    bf16 is the upper half of fp32: adding random bits to the lower half carries into the upper one just that often.
    The bits are drawn on the generator's device; without a generator on that of `x`.

    >>> float(stochastic_round(torch.tensor([1.0])))
    1.0
    """
    bits = x.float().view(torch.int32)
    source = x.device if generator is None else generator.device
    noise = torch.randint(0, 2**16, x.shape, generator=generator, dtype=torch.int32, device=source).to(x.device)
    rounded = torch.where(x.isfinite(), (bits + noise) & -(2**16), bits)
    return rounded.view(torch.float32).to(torch.bfloat16)


class AdamW:
    """AdamW over full parameters: the reference that the sharded optimizers must equal.

    A parameter without a gradient is not updated, as in torch.

    Raises:
        ValueError: if there is no parameter that needs a gradient.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], hyperparameters: Hyperparameters | None = None) -> None:
        self.parameters = [parameter for parameter in dict.fromkeys(parameters) if parameter.requires_grad]
        if not self.parameters:
            raise ValueError("no parameter needs a gradient; AdamW has nothing to update")
        self.hyperparameters, self.num_steps = hyperparameters or Hyperparameters(), 0
        self.moments = [
            (torch.zeros_like(parameter.detach()), torch.zeros_like(parameter.detach()))
            for parameter in self.parameters
        ]

    def step(self, lr_factor: float = 1.0) -> None:
        """Update every parameter that has a gradient."""
        self.num_steps += 1
        for parameter, moments in zip(self.parameters, self.moments, strict=True):
            if parameter.grad is not None:
                grad = parameter.grad.detach()
                adamw_(
                    parameter.detach(),
                    grad,
                    *moments,
                    self.num_steps,
                    self.hyperparameters,
                    self.hyperparameters.lr * lr_factor,
                )

    def zero_grad(self) -> None:
        """Set all gradients to None."""
        for parameter in self.parameters:
            parameter.grad = None


class AdamShard:
    """AdamW over a flat shard of weights, with the optimizer state of those weights alone.

    Args:
        working: the weights that the model computes with, as a flat tensor; updated in place.
        hyperparameters: of all weights of the shard.
        master: keep a copy of the weights in fp32, update it, and round it to the working weights after every step.
        generator: keep no master copy, and round bf16 weights up or down at random, which is right in the mean.

    Raises:
        ValueError: `master` with weights that do not have 16 bits, or `generator` with weights that are not bf16.
    """

    def __init__(
        self,
        working: Tensor,
        hyperparameters: Hyperparameters,
        master: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        self.working, self.hyperparameters, self._generator = working, hyperparameters, generator
        if master and working.element_size() != 2:
            raise ValueError(f"weights in {working.dtype} are their own master copy; leave out master=True")
        if generator is not None and (master or working.dtype != torch.bfloat16):
            raise ValueError(f"rounding at random is for bf16 weights without a master copy, got {working.dtype}")
        self.weight = working.float() if master else working
        wide = torch.float32 if master or generator is not None else working.dtype
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(working, dtype=wide), torch.zeros_like(working, dtype=wide)
        self.extra: dict[str, Tensor] = {}  # further state of the shard by name, such as a moving average

    def step(self, grad: Tensor, step: int, lr_factor: float = 1.0, scale: float = 1.0) -> None:
        """Update the shard with its shard of the gradient, multiplied by `scale`; `step` counts from 1."""
        grad = grad.to(self.exp_avg.dtype)
        if scale != 1.0:
            grad = grad * scale
        weight = self.weight.to(self.exp_avg.dtype)  # itself, unless it is rounded at random
        tensors = (weight, grad, self.exp_avg, self.exp_avg_sq)
        block = _BLOCK if weight.device.type == "cpu" else max(weight.numel(), 1)  # a GPU wants few, large kernels
        for w, g, m, v in zip(*(tensor.split(block) for tensor in tensors), strict=True):
            adamw_(w, g, m, v, step, self.hyperparameters, self.hyperparameters.lr * lr_factor)
        if self._generator is not None:
            self.working.copy_(stochastic_round(weight, self._generator))
        self.round()

    def round(self) -> None:
        """Round the master copy to the working weights."""
        if self.weight is not self.working:
            self.working.copy_(self.weight)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights at their best precision and the moments, by name: what a checkpoint saves."""
        return {"parameter": self.weight, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq, **self.extra}
