"""Plans to export, and what each framework's own parser accepts of the settings.

`framework_names.json` has the names that each framework's own parser accepts at one commit, which it names.
"""

import ast
import json
import re
from pathlib import Path

from hypothesis import strategies as st

from dualpipe_lab.models import LlamaConfig, V3MoEConfig
from dualpipe_lab.plan import Plan, exports
from dualpipe_lab.pp import schedules

NAMES = json.loads((Path(__file__).parent / "framework_names.json").read_text())
FRAMEWORKS = ("megatron", "torchtitan", "deepspeed")
LLAMA = LlamaConfig(num_layers=16, num_heads=8, num_kv_heads=4)
V3 = V3MoEConfig(num_layers=17, num_heads=8, num_kv_heads=4, num_experts=16)
LENGTH = 64


def export(framework, plan, model, rows=2):
    batch = rows * plan.data_size * plan.num_microbatches
    return getattr(exports, framework)(plan, model, LENGTH, batch)


def arguments_of(command):
    """Argument -> its values."""
    found = {}
    for word in command:
        if re.match(r"--[a-z]", word):
            assert word not in found, f"{word} twice"
            found[word] = []
            last = word
        else:
            found[last].append(word)
    return found


FIELDS = {
    "pp": st.sampled_from([1, 2, 4]),
    "dp": st.sampled_from([1, 2, 4]),
    "cp": st.sampled_from([1, 2]),
    "tp": st.sampled_from([1, 2, 4]),
    "ep": st.sampled_from([1, 2, 4]),
    "num_microbatches": st.sampled_from([1, 2, 8]),
    "schedule": st.sampled_from([*schedules.names(synchronous=True)]),
    "chunks": st.sampled_from([None, 2]),
    "zero": st.sampled_from([0, 1, 2, 3]),
    "hybrid": st.booleans(),
    "experts_in_data": st.booleans(),
    "sequence_parallel": st.booleans(),
    "layout": st.sampled_from(["zigzag", "contiguous", "striped"]),
    "recompute": st.booleans(),
    "precision": st.sampled_from(["bfloat16", "float32", "float64"]),
    "overlap": st.booleans(),
    "order": st.permutations(["pp", "dp", "ep", "cp", "tp"]).map(tuple),
    "ranks_per_node": st.sampled_from([None, 2, 4]),
    "loss_chunk": st.sampled_from([None, 16]),
    "multi_token": st.sampled_from([None, 0.3]),
}


@st.composite
def plans(draw):
    """A legal plan of a model: drawn fields, where they do not fit the nearest plan that does."""
    model = draw(st.sampled_from([LLAMA, V3]))
    drawn = Plan(**{name: draw(values) for name, values in FIELDS.items()})
    found = drawn.nearest(model, LENGTH)
    return model, Plan(dp=2) if found is None else found


def check_megatron(command):
    accepted = NAMES["megatron"]["arguments"]
    for name, values in arguments_of(command).items():
        assert name in accepted, f"Megatron-LM has no {name}"
        rule = accepted[name]
        assert len(values) == rule["values"] or (rule["values"] == "+" and values), (name, values)
        for value in values:
            {"int": int, "float": float}.get(rule.get("kind"), str)(value)
            assert value in map(str, rule.get("choices", [value])), (name, value)


KINDS = {"int": int, "bool": bool, "str": str, "None": type(None), "float": float, "list[list[str]]": list}


def is_of(value, annotation):
    """Whether a value is of an annotation, such as `int | None` or `Literal['never', 'always']`."""
    if annotation.startswith("Literal["):
        return value in ast.literal_eval(annotation.removeprefix("Literal"))
    return type(value) in [KINDS[kind.strip()] for kind in annotation.split("|")]


def check_torchtitan(values):
    from torch.distributed.pipelining.schedules import get_schedule_class

    names = NAMES["torchtitan"]
    assert set(values) == {"parallelism", "training", "activation_checkpoint", "loss"}
    for section in ("parallelism", "training"):
        for name, value in values[section].items():
            assert name in names[section], f"torchtitan has no {section}.{name}"
            assert is_of(value, names[section][name]), (name, value)
    get_schedule_class(values["parallelism"].get("pipeline_parallel_schedule", "1F1B"))  # ValueError for no name of its
    balancer = values["parallelism"].get("context_parallel_load_balancer")
    assert balancer in names["context_parallel_load_balancer"]
    for section in ("activation_checkpoint", "loss"):
        component = dict(values[section] or {"component": next(iter(names[section]))})
        fields = names[section][component.pop("component")]
        assert all(is_of(value, fields[name]) for name, value in component.items())


def check_deepspeed(values):
    names = NAMES["deepspeed"]
    assert set(values) <= set(names["top"])
    for section, found in values.items():
        if isinstance(found, dict):
            assert set(found) <= set(names[section]), section
    assert values["zero_optimization"]["stage"] in range(4)
    assert values.get("data_types", {}).get("grad_accum_dtype", "fp32") in ("fp32", "fp16", "bf16")


CHECKS = {"megatron": check_megatron, "torchtitan": check_torchtitan, "deepspeed": check_deepspeed}
