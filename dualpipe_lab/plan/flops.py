"""`model_flops`: the FLOPs of a step: six for each parameter that a token uses, and attention's score products.

In: a model, a plan, tokens.  Out: FLOPs of the model, or of one rank.
  parameters   2 P per token forward, 4 P backward, and 2 P once more where a layer is recomputed; a lookup is free
  scores       2 (d_k + d_v) per head and pair of a query and a key: a causal mask shows S (S + 1) / 2 pairs
Elsewhere: Megatron `num_floating_point_operations`; torchtitan's `get_num_flop_per_token`, which counts S^2.
Source: Narayanan et al. 2021 (arXiv 2104.04473), appendix.
"""

from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.stage_rules import ModelConfig
from dualpipe_lab.plan.plan import Plan
from dualpipe_lab.plan.rules import has_experts, sizes_of


def model_flops(model: ModelConfig, sequence_length: int, causal: bool = True, multi_token: bool = False) -> int:
    """Return the FLOPs of forward and backward of one sequence, without anything that is computed again.

    Args:
        model: what is trained.
        sequence_length: tokens.
        causal: count the pairs that a causal mask shows; else all S^2, as some frameworks do.
        multi_token: with the part that predicts a second token.

    >>> llama3_8b = LlamaConfig(128256, 4096, 14336, 32, 32, 8)
    >>> round(model_flops(llama3_8b, 8192, causal=False) / 8192 / 1e9, 1)  # GFLOP per token
    57.9
    """
    sizes, costs = sizes_of(model), model.layer_costs
    head, hidden = sizes.vocabulary_size * sizes.hidden_size, sizes.hidden_size
    extra = costs[-1] + 2 * hidden * hidden + head if multi_token else 0
    pairs = causal_pairs(sequence_length) if causal else sequence_length**2
    scores = (len(costs) + multi_token) * pairs * _score_flops(model)
    return 3 * (2 * sequence_length * (sum(costs) + head + extra) + scores)


def causal_pairs(length: int, num_ranks: int = 1, layout: str = "zigzag") -> int:
    """Return the pairs of a query and a key that the slowest rank of a ring computes for one sequence.

    >>> causal_pairs(8), causal_pairs(8, 2, "zigzag"), causal_pairs(8, 2, "contiguous")
    (36, 18, 26)
    """
    size = -(-length // num_ranks)
    triangle, others = size * (size + 1) // 2, num_ranks - 1
    return triangle + others * {"contiguous": size * size, "striped": triangle, "zigzag": size * size // 2}[layout]


def _score_flops(model: ModelConfig) -> int:
    latent = None if isinstance(model, LlamaConfig) else model.latent
    sizes = sizes_of(model)
    widths = 2 * sizes.size_of_head if latent is None else latent.key + latent.value
    return 2 * sizes.num_heads * widths


def pass_flops(model: ModelConfig, plan: Plan, shape: tuple[int, int]) -> dict[str, float]:
    """Return FLOPs of one rank for a microbatch, forward and backward, in each kind of layer and end.

    Every rank of tp computes all rows of the experts of its place along ep.
    """
    sizes, (num_rows, length), passes = sizes_of(model), shape, 4 if plan.recompute else 3
    tokens, hidden = 2 * num_rows * length / plan.cp, sizes.hidden_size
    scores = num_rows * causal_pairs(length, plan.cp, plan.layout) * _score_flops(model) / plan.tp
    head = 3 * tokens * hidden * sizes.vocabulary_size / plan.tp
    found = {"dense": passes * (tokens * model.layer_costs[0] / plan.tp + scores), "first": 0.0, "last": head}
    if isinstance(model, LlamaConfig) or not has_experts(model):
        return found
    routed = model.num_experts_per_token * model.expert_parameters
    shared = 3 * hidden * model.shared_ffn_size / plan.tp
    attention = (model.layer_costs[-1] - routed) / plan.tp - shared
    again = 3 if plan.overlap else passes  # overlapped experts are not run again
    found["sparse"] = passes * (tokens * attention + scores) + again * tokens * (routed + shared)
    found["second"] = found["sparse"] + head + passes * tokens * 2 * hidden * hidden / plan.tp
    return found
