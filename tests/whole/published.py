"""transformers' own models as references: tiny, drawn at random, exact in float64."""

import functools
import inspect
import json
import textwrap

import torch
import transformers
from torch import nn

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
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def reference(family="Llama", seed=0, dtype=torch.float64, **options):
    """A model of transformers with random weights of a size that matters, norms included."""
    make = getattr(transformers, f"{family}ForCausalLM")
    config = getattr(transformers, f"{family}Config")(**(SIZES | options))
    model = make(config).to(dtype)
    if family == "DeepseekV3":
        model.set_experts_implementation("eager")  # the default one refuses float64
    model.config.architectures = [make.__name__]  # otherwise set when it is saved
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        biases = [value for name, value in model.named_buffers() if name.endswith("e_score_correction_bias")]
        for parameter in (*model.parameters(), *biases):
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + drawn / 4 if parameter.dim() == 1 else drawn * parameter.shape[-1] ** -0.5)
    return model


def exact(model):
    """The same model with norms and rotary angles in float64: transformers computes both in float32."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = norm_of(module)
        if type(module).__name__.endswith("RotaryEmbedding"):
            module.forward = angles_of(module)
        if type(module).__name__.endswith("TopkRouter"):
            module.forward = router_of(module)
    return model.eval()


def norm_of(module):
    eps = module.variance_epsilon
    return lambda x: module.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def router_of(module):
    """transformers' own router, which computes its logits in float32, with float64 in place of that."""
    code = textwrap.dedent(inspect.getsource(type(module).forward)).replace("torch.float32", "torch.float64")
    found = {}
    exec(code, vars(inspect.getmodule(type(module))), found)
    return functools.partial(found["forward"], module)


def angles_of(module):
    """Cosines and sines of transformers' own frequencies, recomputed in float64; llama3 scales as its paper says."""
    from dualpipe_lab.models import config_from_pretrained

    config = config_from_pretrained(module.config.to_dict())
    size = config.latent.position if hasattr(config, "latent") else config.size_of_head
    steps = config.rope_base ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    if getattr(config, "rope_scaling", None) is not None:
        steps = torch.tensor(
            [step * config.rope_scaling.factor_of(step) for step in steps.tolist()], dtype=torch.float64
        )
    torch.testing.assert_close(steps, module.inv_freq.double(), rtol=1e-5, atol=0)  # theirs, computed in float32

    def forward(x, position_ids):
        angles = position_ids[..., None].double() * steps
        angles = torch.cat((angles, angles), -1)
        return angles.cos(), angles.sin()

    return forward


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
