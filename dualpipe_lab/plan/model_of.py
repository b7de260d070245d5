"""`model_of`: the sizes of a published model, by its name or from its config.json.

In: a name, a folder, a file, or the values of a config.json.  Out: a `LlamaConfig`, a `V3MoEConfig` or a `GptConfig`.
  names                        of `KNOWN_MODELS`; nothing is downloaded
  Llama, Qwen3, DeepSeek-V3    as `models.config_from_pretrained` reads them; a second token is a plan's matter
  Mixtral                      a softmax over all experts, of which the k largest are normalised: the same as a softmax
                               over those alone
  GPT                          by the names of GPT-2
DeepSeek-V2 is not read: it scores a group of experts by the largest score in it, and V3 by the two largest.
Elsewhere: transformers `AutoConfig.from_pretrained`.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from dualpipe_lab.models.pretrained.config import (
    FAMILIES,
    NEUTRAL,
    NUMBER,
    ROPE_KINDS,
    WHOLE,
    Kind,
    PretrainedError,
    check_kinds,
    check_neutral,
    config_from_pretrained,
    read_json,
    rope_of,
)
from dualpipe_lab.models.v3_moe_config import V3MoEConfig
from dualpipe_lab.plan.fields import PlanFields
from dualpipe_lab.plan.gpt_config import GptConfig
from dualpipe_lab.plan.known_models import KNOWN_MODELS
from dualpipe_lab.plan.states import AnyModel, parts_of_place

GPT, MIXTRAL = "GPT2LMHeadModel", "MixtralForCausalLM"
ARCHITECTURES = (*FAMILIES, MIXTRAL, GPT)
_MIXTRAL_SIZES = {
    "vocab_size": "vocabulary_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
}
_MIXTRAL_KINDS: dict[str, Kind] = {
    **dict.fromkeys((*_MIXTRAL_SIZES, "num_key_value_heads", "head_dim"), WHOLE),
    **ROPE_KINDS,
    "rms_norm_eps": NUMBER,
}
_MIXTRAL_NEUTRAL: dict[str, tuple[Any, ...]] = NEUTRAL | {
    "sliding_window": (None,),
    "tie_word_embeddings": (False, None),
}


def model_of(source: str | Path | Mapping[str, Any]) -> AnyModel:
    """Return the sizes of a published model.

    Args:
        source: a name of `KNOWN_MODELS`, a folder with config.json, such a file, or its values.

    Raises:
        ValueError: a name that is neither, with the nearest one; another architecture; a field that is missing, or one
            that this library cannot compute.

    >>> model_of("llama3-8b").num_parameters()
    8030261248
    >>> model_of("lama3-8b")
    Traceback (most recent call last):
    ValueError: no model and no folder is called 'lama3-8b'; the nearest known model is llama3-8b
    """
    if isinstance(source, Mapping):
        return _read(source, "config.json")
    name = str(source)
    if name in KNOWN_MODELS:
        return _read(KNOWN_MODELS[name].values, name)
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return _read(read_json(path), str(path))
    raise ValueError(f"no model and no folder is called {name!r}; the nearest known model is {_nearest_name(name)}")


def num_parameters(model: AnyModel) -> int:
    """Return the number of parameters of a full model, without biases of a router's selection.

    >>> num_parameters(model_of("mixtral-8x7b"))
    46702792704
    """
    return sum(part.numel for part in parts_of_place(model, PlanFields(), 0, 0))


def _nearest_name(name: str) -> str:
    """Return the known name that is most like another one, of which the last part of a path counts."""
    wanted = name.rsplit("/", 1)[-1].lower().replace("_", "-").replace("meta-llama-3", "llama3")
    wanted = wanted.replace("llama-3", "llama3").removesuffix("-instruct")
    longer = [known for known in KNOWN_MODELS if known.startswith(wanted)]
    return str(get_close_matches(wanted, longer or list(KNOWN_MODELS), n=1, cutoff=0)[0])


def _read(values: Mapping[str, Any], where: str) -> AnyModel:
    architecture = _architecture(values, where)
    try:
        if architecture == GPT:
            return _checked(GptConfig.from_fields(values))
        if architecture == MIXTRAL:
            return _mixtral(values, where)
        return config_from_pretrained(values)
    except ValueError as error:
        text = str(error).replace("config.json", where, 1)
        raise PretrainedError(f"{text}{_example(values, architecture, text)}") from error


def _architecture(values: Mapping[str, Any], where: str) -> str:
    """Return the architecture that is named, which is one of those that are read."""
    named = values.get("architectures")
    name = named[0] if isinstance(named, list) and len(named) == 1 else None
    if name in ARCHITECTURES:
        return str(name)
    nearest = get_close_matches(str(name), ARCHITECTURES, n=1, cutoff=0)[0]
    raise PretrainedError(
        f"{where} needs an architecture that is read here, got architectures={named!r}; the nearest is {nearest}, and "
        f"known are {', '.join(ARCHITECTURES)}"
    )


def _example(values: Mapping[str, Any], architecture: str, text: str) -> str:
    """Return what the first known model of an architecture has for the missing field that a message names."""
    for name, known in KNOWN_MODELS.items():
        if known.values["architectures"] == [architecture]:
            words = text.split()
            field = next((each for each in known.values if each in words and values.get(each) is None), None)
            return "" if field is None else f"; {name} has {field}={known.values[field]!r}"
    return ""


def _checked(config: GptConfig) -> GptConfig:
    config.outline.check()
    return config


def _mixtral(values: Mapping[str, Any], where: str) -> V3MoEConfig:
    """Return the sizes of a Mixtral: every layer has experts, and attention has no norms of its own."""
    check_kinds(values, where, _MIXTRAL_KINDS, _MIXTRAL_SIZES)
    check_neutral(values, where, _MIXTRAL_NEUTRAL)
    base, scaling = rope_of(values, where)
    config = V3MoEConfig(
        **{ours: values[theirs] for theirs, ours in _MIXTRAL_SIZES.items()},
        num_kv_heads=values.get("num_key_value_heads") or values["num_attention_heads"],
        head_size=values.get("head_dim"),
        expert_ffn_size=values["intermediate_size"],
        num_dense_layers=0,
        num_groups=1,
        num_groups_per_token=1,
        num_shared_experts=0,
        scale=1.0,
        balance=0.0,
        scoring="softmax",
        selection_bias=False,
        rope_base=base,
        rope_scaling=scaling,
        eps=1e-5 if values.get("rms_norm_eps") is None else float(values["rms_norm_eps"]),
    )
    config.check()
    return config
