"""`reference`: the same training in one process, in plain torch, without any parallel code.

Chapter: book/whole/training.  In: a config, data, options.  Out: what every plan must reproduce.
The model is `PlainLlama` or `PlainV3MoE`, the backward is autograd's, the optimizer is `torch.optim.AdamW`, the norm is
`torch.nn.utils.clip_grad_norm_`, and the batch is one piece.  Weights are drawn by name, as those of the stages are.
"""

from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from dualpipe_lab.launch.operating_system import peak_memory_bytes
from dualpipe_lab.models.plain_llama import PlainLlama
from dualpipe_lab.models.plain_v3_moe import PlainMTP, PlainRouter, PlainV3MoE
from dualpipe_lab.models.stage_rules import check_mtp
from dualpipe_lab.models.v3_moe_config import V3MoEConfig
from dualpipe_lab.tp.shard import initialize_parameters
from dualpipe_lab.train.metrics import Metrics
from dualpipe_lab.train.options import Config, Data, check_data, named_options
from dualpipe_lab.train.result import Result


def reference(
    config: Config,
    data: Data,
    steps: int,
    precision: str = "float64",
    mtp: float | None = None,
    **options: Any,
) -> Result:
    """Train in this process, without ranks, and return metrics, weights and the raw gradients of two steps.

    Args:
        config: of the model.
        data: a text, or documents.
        steps: of the training.
        precision: of weights and gradients, float64 or float32.
        mtp: the weight of a second token's loss; None for the next token alone.
        options: as in `TrainOptions`.

    Raises:
        ValueError: as `run`.
    """
    chosen = named_options(**options)
    config.check()
    check_data(config, data, steps, chosen)
    if mtp is not None:
        check_mtp(config, 1, mtp)
    make: Any = PlainV3MoE if isinstance(config, V3MoEConfig) else PlainLlama
    if mtp is not None:
        make = partial(PlainMTP, weight=mtp)
    model: PlainLlama | PlainV3MoE = make(config, dtype=getattr(torch, precision))
    initialize_parameters(model, chosen.seed)
    loads = _count_loads(model)
    optimizer = torch.optim.AdamW(model.parameters(), **chosen.adamw, foreach=False, fused=False)
    result, sampler = Result("one process", []), chosen.sampler(data)
    for step in range(steps):
        started = perf_counter()
        batch, lr = sampler.batch(step), chosen.lr * chosen.schedule.factor(step)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        padding = batch.padding if isinstance(model, PlainV3MoE) else []
        loss = model.loss(batch.inputs[0], batch.targets[0], *padding)
        loss.backward()
        if step in (0, steps - 1):
            grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            result.gradients.append({name: grad.clone() for name, grad in grads.items()})
        norm = None
        if chosen.max_norm is not None:
            norm = float(nn.utils.clip_grad_norm_(model.parameters(), chosen.max_norm, foreach=False))
        optimizer.step()
        _move_biases(loads, chosen.bias_speed)
        rate = batch.num_tokens / (perf_counter() - started)
        result.metrics.append(
            Metrics(step + 1, float(loss.detach()), norm, lr, rate, 0.0, (0,), (peak_memory_bytes(),))
        )
    result.state = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return result


def _count_loads(model: nn.Module) -> dict[PlainRouter, Tensor]:
    loads: dict[PlainRouter, Tensor] = {}

    def count(router: PlainRouter, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        loads[router] += torch.bincount(output[1].flatten(), minlength=len(loads[router]))

    for module in model.modules():
        if isinstance(module, PlainRouter):
            loads[module] = torch.zeros(module.config.num_experts, dtype=torch.int64)
            module.register_forward_hook(count)
    return loads


def _move_biases(loads: dict[PlainRouter, Tensor], speed: float) -> None:
    for router, load in loads.items():
        if router.selection_bias is not None:
            router.selection_bias += speed * torch.sign(load.double().mean() - load).to(router.selection_bias.dtype)
        load.zero_()
