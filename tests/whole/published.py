"""transformers' own models as references: tiny, drawn at random, exact in float64."""

import functools
import inspect
import json
import re
import textwrap

import torch
import transformers
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS as ROPE

from dualpipe_lab import models
from dualpipe_lab.models.parameters import EXPERTS, full_parameters

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
}
DEEPSEEK = {
    "family": "DeepseekV3",
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}
QWEN3_MOE = {
    "family": "Qwen3Moe",
    "head_dim": 6,
    "moe_intermediate_size": 12,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
}
YARN = {  # DeepSeek-V3's, for shorter sequences; with unequal scales, so that both take part
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 40.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

PLANNED = {  # for plans of 8 ranks: enough heads, and a family more is a line more
    "Llama 3.1": {"num_attention_heads": 8, "num_key_value_heads": 4, "rope_parameters": LLAMA3},
    "Qwen3, tied": {
        "family": "Qwen3",
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 6,
        "tie_word_embeddings": True,
    },
    "Qwen3-MoE": QWEN3_MOE | {"num_attention_heads": 8, "num_key_value_heads": 4},
    "DeepSeek-V3": DEEPSEEK | {"num_attention_heads": 8, "num_key_value_heads": 8},
}


def reference(family="Llama", seed=0, dtype=torch.float64, **options):
    """A model of transformers with random weights of a size that matters, norms included."""
    make = getattr(transformers, f"{family}ForCausalLM")
    config = getattr(transformers, f"{family}Config")(**(SIZES | options))
    model = make(config).to(dtype)
    if family in ("DeepseekV3", "Qwen3Moe"):
        model.set_experts_implementation("eager")  # the default one refuses float64
    model.config.architectures = [make.__name__]  # otherwise set when it is saved
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        biases = [value for name, value in model.named_buffers() if name.endswith("e_score_correction_bias")]
        for parameter in (*model.parameters(), *biases):
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + drawn / 4 if parameter.dim() == 1 else drawn * parameter.shape[-1] ** -0.5)
    return model


def written(kinds, factory, size="15KB"):
    """By kind, a folder of several files that transformers has written."""
    found = {}
    for kind, options in kinds.items():
        found[kind] = factory.mktemp("published") / "model"
        reference(**options).save_pretrained(found[kind], max_shard_size=size)
    return found


def exact(model):
    """The same model with norms and rotary angles in float64: transformers computes both in float32."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = norm_of(module)
        if type(module).__name__.endswith("RotaryEmbedding"):
            module.forward = angles_of(module)
        if type(module).__name__.lower().endswith("topkrouter"):
            module.forward = router_of(module)
    return model.eval()


def norm_of(module):
    eps = module.variance_epsilon
    return lambda x: module.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def router_of(module):
    """transformers' own router, which computes its logits in float32, with float64 in place of that."""
    return functools.partial(in_float64(type(module).forward), module)


def in_float64(function):
    """A function of transformers with float64 in place of the float32 in its source."""
    code = textwrap.dedent(inspect.getsource(function))
    found = {}
    exec(re.sub(r"torch\.float(32)?\b", "torch.float64", code), vars(inspect.getmodule(function)), found)
    return found[function.__name__]


def angles_of(module):
    """Cosines and sines of transformers' own angles, with float64 in place of the float32 in its functions."""
    make = module.compute_default_rope_parameters if module.rope_type == "default" else ROPE[module.rope_type]
    steps, length = in_float64(make)(module.config)
    torch.testing.assert_close(steps, module.inv_freq.double(), rtol=1e-5, atol=0)
    assert length == module.attention_scaling

    def forward(x, position_ids):
        angles = position_ids[..., None].double() * steps
        angles = torch.cat((angles, angles), -1)
        return angles.cos() * length, angles.sin() * length

    return forward


def loaded(folder, dtype=torch.float64):
    """transformers' model of a folder that has every key of it and no other."""
    found, told = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=dtype)
    if found.config.architectures[0].startswith(("DeepseekV3", "Qwen3Moe")):
        found.set_experts_implementation("eager")
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return found


def plain(config, dtype=torch.float64):
    return (models.PlainLlama if isinstance(config, models.LlamaConfig) else models.PlainV3MoE)(config, dtype)


def read(folder, dtype=torch.float64):
    """Our plain model of a published folder."""
    model = plain(models.config_from_pretrained(folder), dtype)
    models.load_pretrained(model, folder)
    return model


def close(found, expected, bound=1e-10):
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= bound * max(1.0, float(expected.abs().max()))


def gradients(model, ids, targets):
    """Logits, loss and raw gradients by published name."""
    logits = model(ids).logits
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    model.zero_grad()
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return logits.detach(), loss.detach(), {name: part for item in grads.items() for name, part in single(*item)}


def single(name, grad):
    """The same under the names in files, where experts are single and gate and up are two tensors."""
    stem, _, kind = name.rpartition(".")
    if not stem.endswith("experts"):
        return [(name, grad)]
    parts = (
        {"down_proj": grad}
        if kind == "down_proj"
        else dict(zip(("gate_proj", "up_proj"), grad.chunk(2, 1), strict=True))
    )
    return [(f"{stem}.{e}.{part}.weight", one) for part, every in parts.items() for e, one in enumerate(every)]


def by_our_names(grads, config):
    """The same gradients as parameters here have them: by our names, with experts stacked."""
    found = {}
    for name, each in full_parameters(config).items():
        parts = [grads[one] for one in each.file_names if one in grads]  # a bias has none
        if parts:
            found[name] = torch.stack(parts) if each.sharded == EXPERTS else parts[0]
    return found


def cut(path):
    """Take the last bytes away from a file."""
    path.write_bytes(path.read_bytes()[:-8])


def change(file, edit):
    """Edit the values of a JSON file."""
    values = json.loads(file.read_text())
    edit(values)
    file.write_text(json.dumps(values))


def lie(folder):
    """Let a folder's index name another file for a tensor."""

    def edit(values):
        places = values["weight_map"]
        places["model.norm.weight"] = places["model.embed_tokens.weight"]

    change(folder / "model.safetensors.index.json", edit)
