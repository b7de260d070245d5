"""AdamW by hand, and the update of a flat shard by AdamW or another elementwise optimizer.

Chapter: book/dp/distributed-adam.  In: weights, gradients.  Out: updated weights; two moments per weight.
  m <- b1 m + (1 - b1) g            v <- b2 v + (1 - b2) g^2
  w <- w (1 - lr * decay)           w <- w - lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)      t = 1, 2, ...
  state                             2 numbers per weight; with a master copy of 16-bit weights 3
Without a master copy, stochastic rounding keeps small updates of bf16 weights: the weights are right in the mean.
Every operation is elementwise, so a shard's update is bitwise that of the same elements of the full parameters.
Elsewhere: torch.optim.AdamW, which computes the same bits on a CPU; Megatron DistributedOptimizer.
Source: Kingma and Ba 2015 (arXiv 1412.6980), algorithm 1; Loshchilov and Hutter 2019 (arXiv 1711.05101), algorithm 2.
"""

from collections.abc import Callable, Iterable
from functools import partial
from math import inf, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_BLOCK = 2**18  # elements: the eight passes of an update then find a shard's numbers in a processor's cache


def adamw_(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> None:
    """Update `weight` and its moments in place by one step of AdamW; `step` counts from 1.

    Args:
        weight: any shape; the other tensors have the same.
        grad: the gradient, in the type of the weight.
        exp_avg: running mean of the gradients.
        exp_avg_sq: running mean of their squares.
        step: t of the bias corrections.
        lr: the learning rate.
        betas: decay of the two running means.
        eps: is added to the denominator; not so small that it is 0 in the type of the weight.
        weight_decay: the part of the weight, times `lr`, that is subtracted.
    """
    check_eps(weight.dtype, eps)
    beta1, beta2 = betas
    exp_avg.lerp_(grad, 1 - beta1)  # m + (1 - b1) (g - m), as torch has it
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    weight.mul_(1 - lr * weight_decay)  # decoupled: the decay never enters the moments
    # sqrt(v / c) as sqrt(v) / sqrt(c), and eps outside of the root
    denominator = exp_avg_sq.sqrt().div_(sqrt(1 - beta2**step)).add_(eps)
    weight.addcdiv_(exp_avg, denominator, value=-lr / (1 - beta1**step))


def check_eps(dtype: torch.dtype, eps: object) -> None:
    """Raise ValueError for an `eps` that rounds to 0 in a type: where gradients are zero, 0 / 0 makes weights NaN."""
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # the smallest number above 0
    if isinstance(eps, float) and 0 < eps <= least / 2:
        raise ValueError(
            f"eps={eps} is 0 in {dtype}, and weights whose gradients are zero would become NaN; keep fp32 weights "
            "(master=True of DDP and ZeRO), or use eps=1e-4"
        )


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


class AdamW(Optimizer):  # type: ignore[misc]
    """AdamW as an optimizer of torch: of full parameters, and of the shards of DDP and ZeRO unless they get another.

    Args:
        params: parameters, or param groups.
        lr, betas, eps, weight_decay: as in `adamw_`.

    Raises:
        ValueError: a number is out of its range, `eps` is 0 in the type of a parameter, or no parameter needs a
            gradient.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        if not self.state:
            raise ValueError("no parameter needs a gradient; AdamW has nothing to update")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Check the numbers of a group and make the moments of its parameters."""
        super().add_param_group(param_group)
        lr, betas, eps, weight_decay = (self.param_groups[-1][name] for name in _NAMES)
        try:
            beta1, beta2 = betas
            fits = all(0 <= beta < 1 for beta in (beta1, beta2))
            fits = fits and all(0 <= number < inf for number in (lr, eps, weight_decay))
        except TypeError:  # one is no number
            fits = False
        if not fits:
            raise ValueError(
                "AdamW needs betas in [0, 1), and finite lr, eps and weight_decay of at least 0, got "
                f"lr={lr!r}, betas={betas!r}, eps={eps!r}, weight_decay={weight_decay!r}"
            )
        for parameter in self.param_groups[-1]["params"]:
            if parameter.requires_grad:
                check_eps(parameter.dtype, eps)
                exp_avg, exp_avg_sq = (torch.zeros_like(parameter.detach()) for _ in range(2))
                self.state[parameter] = {"step": 0, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}

    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            numbers = {name: group[name] for name in _NAMES}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter.detach(), parameter.grad.detach(), self.state[parameter], numbers)

    def _update(self, weight: Tensor, grad: Tensor, state: dict[str, Any], numbers: dict[str, Any]) -> None:
        state["step"] += 1
        block = _BLOCK if weight.device.type == "cpu" else max(weight.numel(), 1)  # a GPU wants few, large kernels
        tensors = weight, grad, state["exp_avg"], state["exp_avg_sq"]
        for w, g, m, v in zip(*(torch.atleast_1d(tensor).split(block) for tensor in tensors), strict=True):
            adamw_(w, g, m, v, state["step"], **numbers)


_NAMES = "lr", "betas", "eps", "weight_decay"


class OptimizerShard:
    """A flat shard of weights with the state of an elementwise optimizer for those weights alone.

    Args:
        working: the weights that the model computes with, as a flat tensor; updated in place.
        optimizer: makes an optimizer of torch for a list with one parameter.
        master: keep a copy of the weights in fp32, update it, and round it to the working weights after every step.
        generator: keep no master copy, and round bf16 weights up or down at random, which is right in the mean.
        hyperparameters: those of the optimizer.

    Raises:
        ValueError: `master` with weights that do not have 16 bits, or `generator` with weights that are not bf16.
    """

    def __init__(
        self,
        working: Tensor,
        *,
        optimizer: Callable[..., Optimizer] = AdamW,
        master: bool = False,
        generator: torch.Generator | None = None,
        **hyperparameters: Any,
    ) -> None:
        self.working, self._generator = working, generator
        if master and working.element_size() != 2:
            raise ValueError(f"weights in {working.dtype} are their own master copy; leave out master=True")
        if generator is not None and (master or working.dtype != torch.bfloat16):
            raise ValueError(f"rounding at random is for bf16 weights without a master copy, got {working.dtype}")
        self.weight = working.float() if master else working
        self._parameter = nn.Parameter(self.weight if generator is None else working.float())
        self._make = partial(optimizer, **hyperparameters)
        self._optimizer = self._make([self._parameter])
        self.name = type(self._optimizer).__name__
        self._group: dict[str, Any] = {}  # the values that the optimizer has been given last
        self._is_lazy = not self.state  # the first step makes the state
        self.extra: dict[str, Tensor] = {}  # further state of the shard by name, such as a moving average
        if generator is not None:
            self._parameter.data = self._parameter.new_empty(0)

    def take_values(self, group: dict[str, Any]) -> None:
        """Go on with the values of a param group, such as a learning rate that a scheduler has set."""
        if group != self._group:
            self._group = dict(group)
            check_eps(self._parameter.dtype, group.get("eps"))
            self._optimizer.param_groups[0].update({**group, "params": [self._parameter]})

    def step(self, grad: Tensor, scale: float = 1.0) -> None:
        """Update the shard with its shard of the gradient, multiplied by `scale`.

        Weights that somebody has changed since, as load_state_dict() does, are changed in their master copy first.
        """
        if self.weight is not self.working:  # compared by value: no version counts what is changed through .data
            torch.where(self.weight.to(self.working.dtype) == self.working, self.weight, self.working, out=self.weight)
        if self._generator is not None:
            self._parameter.data = self.working.float()
        grad = grad.to(self._parameter.dtype)
        self._parameter.grad = grad * scale if scale != 1.0 else grad
        self._optimizer.step()
        self._parameter.grad = None
        if self._generator is not None:
            self.working.copy_(stochastic_round(self._parameter.detach(), self._generator))
            self._parameter.data = self._parameter.new_empty(0)
        if self.weight is not self.working:
            self.round()

    def round(self) -> None:
        """Round the master copy to the working weights."""
        self.working.copy_(self.weight)

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's state by name: tensors of the shard's shape, and numbers that all elements share."""
        state: dict[str, Any] = self._optimizer.state.get(self._parameter, {})
        return state

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        self._optimizer.state.pop(self._parameter, None)
        if state:  # else the first step makes it
            self._optimizer.state[self._parameter] = state

    def make_state(self, has_stepped: bool) -> None:
        """Have the tensors of a state before or after the first step, for a checkpoint to fill."""
        if self._is_lazy and has_stepped != bool(self.state):
            sample = nn.Parameter(self._parameter.new_zeros(2))
            sample.grad = torch.zeros_like(sample)
            optimizer = self._make([sample])
            optimizer.step()
            self.state = {
                name: torch.zeros_like(self.working, dtype=value.dtype) if is_elementwise(value, sample) else value
                for name, value in (optimizer.state[sample].items() if has_stepped else ())
            }

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights at their best precision and the state of each: what a checkpoint saves."""
        state = {name: value for name, value in self.state.items() if is_elementwise(value, self.working)}
        return {"parameter": self.weight, **state, **self.extra}


def is_elementwise(value: object, weight: Tensor) -> bool:
    """Return whether a value of an optimizer's state has an element for each of the weights."""
    return isinstance(value, Tensor) and value.shape == weight.shape


PROBED_STEPS = 8  # an optimizer may begin to look at the whole tensor late


def check_elementwise(make: Callable[..., Optimizer]) -> None:
    """Raise ValueError for an optimizer that updates a weight otherwise than its flat halves, which two ranks hold."""
    generator = torch.Generator("cpu").manual_seed(0)
    draws = torch.randn(1 + PROBED_STEPS, 24, generator=generator, dtype=torch.float64, device="cpu")
    scales = (1, 1e3, 1e-3)  # what divides by a norm, or clips, shows at one of them

    def trained(shape: tuple[int, ...], split: Callable[[Tensor], Iterable[Tensor]]) -> Tensor:
        weights, *grads = draws.view(-1, *shape)
        parameters = [nn.Parameter(part.clone()) for part in split(weights)]
        optimizers = [make([parameter]) for parameter in parameters]
        for number, grad in enumerate(grads):
            for parameter, optimizer, part in zip(
                parameters, optimizers, split(scales[number % 3] * grad), strict=True
            ):
                parameter.grad = part.clone()
                optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in parameters])

    name = type(make([nn.Parameter(draws[0].view(4, 6))])).__name__  # here errors in its arguments pass through
    problem = ""
    try:
        for kind, shape in (("matrix", (4, 6)), ("convolution", (2, 2, 3, 2))):
            with torch.random.fork_rng(devices=[]):
                full = trained(shape, lambda weight: [weight])
                halves = trained(shape, lambda weight: weight.flatten().chunk(2))
            if not torch.allclose(full, halves, rtol=1e-9, atol=0):
                problem = problem or f"within {PROBED_STEPS} steps halves of a {kind} move otherwise than all of it"
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        raise ValueError(
            f"{name} cannot train flat shards of the weights ({problem}); use an optimizer that updates each element "
            "by itself, such as AdamW or torch.optim.SGD"
        )
