"""The planner's page: memory, seconds and bytes of a plan for a model, on a page without a kernel.

Chapter: book/whole/plan-your-run.  In: a first choice.  Out: HTML with controls, bars, a timeline, tables, a frontier.
Python sends facts alone, about 4 kB: sizes of models, numbers of accelerators and links, and the rules of Megatron.
The page computes the same estimate as `plan.estimate(..., MEGATRON)`, `plan.step_time(..., MEGATRON_TIME)` and
`Plan.traffic`: equal bytes, and seconds that differ in the last digits of a double.
What the page offers is less than what the library computes: known models but GPTs, balanced routing, experts within the
data ranks, no second token, the usual stages per rank, bfloat16, sequence parallelism wherever tp is above 1, zigzag
order along cp, ZeRO without hybrid.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from html import escape
from typing import Any

from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.stage_rules import ModelConfig
from dualpipe_lab.models.v3_moe_config import V3MoEConfig
from dualpipe_lab.plan.accelerators import CLUSTERS
from dualpipe_lab.plan.cluster import Cluster
from dualpipe_lab.plan.efficiency import Efficiency
from dualpipe_lab.plan.estimate import Estimate, estimate
from dualpipe_lab.plan.gpt_config import GptConfig
from dualpipe_lab.plan.hardware import LinkClass
from dualpipe_lab.plan.kept_tensors import MEGATRON
from dualpipe_lab.plan.known_models import KNOWN_MODELS
from dualpipe_lab.plan.memory import OUTSIDE_BYTES, SHARE
from dualpipe_lab.plan.model_of import model_of
from dualpipe_lab.plan.plan import Plan
from dualpipe_lab.plan.step_time import StepTime, step_time
from dualpipe_lab.plan.time_rules import MEGATRON_TIME
from dualpipe_lab.pp import schedules
from dualpipe_lab.viz.embed import element

_GB = 10**9
_PASSES = 2**14  # as in static/plan-model.mjs
_POWERS = tuple(2**power for power in range(18))
NUMBERS: dict[str, tuple[tuple[int, ...], int]] = {  # where the sliders stop, and the largest number of the field
    "gpus": (_POWERS[:15], 2**17),
    "node": ((1, 2, 4, 8, 16, 32, 64, 72), 1024),
    "slower": (_POWERS[:6], 1000),
    "sequence": (_POWERS[11:], 2**20),
    "batch": (_POWERS[:13], 2**17),
    "rows": (_POWERS[:4], 1024),
    "tp": (_POWERS[:4], 128),
    "cp": (_POWERS[:5], 1024),
    "ep": (_POWERS[:7], 256),
    "pp": (_POWERS[:5], 128),
}
CHOICES: dict[str, tuple[Any, ...]] = {  # what each other control offers, beside models and accelerators
    "schedule": tuple(schedules.names(synchronous=True)),
    "zero": (0, 1, 2, 3),
    "recompute": (False, True),
    "overlap": (False, True),
}
START: dict[str, Any] = {
    "model": "llama3-8b", "gpu": "h100", "gpus": 8, "node": 8, "slower": 1, "sequence": 8192, "batch": 64, "rows": 1,
    "tp": 1, "cp": 1, "pp": 8, "ep": 1, "schedule": "1f1b", "zero": 0, "recompute": False, "overlap": False,
}  # fmt: skip


class PlannerPage:
    """The element <dp-planner>; it prints as the estimate of its first choice.

    Args:
        start: what the page shows first, by the names of `START`; those left out are the ones there.

    Raises:
        ValueError: a name or a value that the page does not offer, with those that it does, or a plan that breaks a
            rule.

    >>> print(PlannerPage(tp=8, pp=1, zero=0, batch=8))
    llama3-8b on 8 x h100: 0.89 s per step, 28.5 GB on the fullest GPU of 85.5 GB
    """

    def __init__(self, **start: Any) -> None:
        usual = {"node": gpus()[start["gpu"]].ranks_per_node} if start.get("gpu") in gpus() else {}
        self.start = START | usual | start
        for name, value in self.start.items():
            _check_offered(name, value)
        _ = self.memory, self.time

    @property
    def spec(self) -> dict[str, Any]:
        """The specification that the element reads."""
        marks, most = ({name: both[place] for name, both in NUMBERS.items()} for place in (0, 1))
        return {**facts(), "choices": marks | CHOICES, "most": most, "start": self.start}

    @cached_property
    def memory(self) -> Estimate:
        """The library's estimate of the first choice."""
        choice = self.start
        config, plan, cluster = planned(choice)
        return estimate(config, plan, cluster, choice["sequence"], choice["batch"], MEGATRON)

    @cached_property
    def time(self) -> StepTime:
        """The library's seconds of the first choice."""
        choice = self.start
        config, plan, cluster = planned(choice)
        return step_time(config, plan, cluster, choice["sequence"], choice["batch"], MEGATRON_TIME)

    def to_html(self, script: bool = True) -> str:
        """Return the element around a table of the first choice, for readers without scripts."""
        return element("dp-planner", self.spec, self._table(), script)

    def _repr_html_(self) -> str:
        return self.to_html()

    def __str__(self) -> str:
        choice, most = self.start, self.memory.largest.total.num_bytes / _GB
        limit = self.memory.cluster.accelerator.memory_bytes / _GB
        where = f"{choice['model']} on {choice['gpus']} x {choice['gpu']}"
        return f"{where}: {self.time.seconds:.2f} s per step, {most:.1f} GB on the fullest GPU of {limit:.1f} GB"

    def _table(self) -> str:
        places = [memory for (_, cp, tp), memory in self.memory.places.items() if not cp and not tp]
        rows = "".join(
            f"<tr><td>{one.pp_rank}</td><td>{one.states.total / _GB:.1f}</td>"
            f"<td>{one.allocated / _GB:.1f}</td><td>{one.total.num_bytes / _GB:.1f}</td></tr>"
            for one in places
        )
        head = "<tr><th>rank of pp</th><th>states</th><th>all tensors</th><th>with reserve</th></tr>"
        return f"<table><caption>{escape(str(self))}; GB</caption>{head}{rows}</table>"


def _check_offered(name: str, value: Any) -> None:
    """Refuse a control or a value that the page does not have."""
    offered = {"model": tuple(models()), "gpu": tuple(gpus()), **CHOICES}
    if name not in START:
        raise ValueError(f"the page has no control {name!r}; it has {', '.join(START)}")
    if name not in NUMBERS:
        if value not in offered[name]:
            raise ValueError(f"{name} is one of {', '.join(map(str, offered[name]))}, got {value!r}")
    elif not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= NUMBERS[name][1]:
        raise ValueError(f"{name} is a whole number from 1 to {NUMBERS[name][1]}, got {value!r}")


def planned(choice: Mapping[str, Any]) -> tuple[ModelConfig, Plan, Cluster]:
    """Return model, plan and cluster of a choice.

    Raises:
        ValueError: ranks that do not divide; all other rules are those of `Plan.check`.
    """
    config = models()[choice["model"]]
    used = choice["tp"] * choice["cp"] * choice["pp"]
    if choice["gpus"] % used:
        raise ValueError(f"pp x cp x tp are {used} ranks, and there are {choice['gpus']} GPUs; use smaller axes")
    dp_size = choice["gpus"] // used
    cluster = Cluster.of(choice["gpu"], choice["gpus"], choice["node"])
    between = replace(cluster.between, bandwidth=cluster.between.bandwidth / choice["slower"])
    axes = {"pp": choice["pp"], "dp": dp_size, "cp": choice["cp"], "tp": choice["tp"]}
    plan = Plan(
        **axes, num_microbatches=max(1, choice["batch"] // (dp_size * choice["rows"])), schedule=choice["schedule"],
        zero=choice["zero"], recompute=choice["recompute"], overlap=choice["overlap"], ep=choice["ep"],
        experts_in_data=choice["ep"] > 1, sequence_parallel=choice["tp"] > 1, precision="bfloat16",
    )  # fmt: skip
    _check_passes(plan)
    return config, plan, replace(cluster, between=between)


def _check_passes(plan: Plan) -> None:
    """Refuse a plan with more microbatches than the page computes within 100 ms; a schedule may refuse them first."""
    passes = plan.num_microbatches * plan.pp
    if passes <= _PASSES:
        passes = plan.num_microbatches * plan.num_stages
    if passes > _PASSES:
        raise ValueError(
            f"the page computes {_PASSES} passes of microbatches through stages, got {passes}; use larger microbatches"
        )


def models() -> dict[str, ModelConfig]:
    """Return the models that the page offers, all but GPTs; of equal sizes the first."""
    found: dict[str, ModelConfig] = {}
    sizes: list[dict[str, Any]] = []
    for name in KNOWN_MODELS:
        config = model_of(name)
        if not isinstance(config, GptConfig) and (size := _sizes(config)) not in sizes:
            sizes.append(size)
            found[name] = config
    return found


def gpus() -> dict[str, Cluster]:
    """Return the accelerators with their links, in one node of the usual size."""
    return {name: Cluster.of(name, known[1]) for name, known in CLUSTERS.items()}


def facts() -> dict[str, Any]:
    """Return what the page needs to compute estimates: sizes, hardware, rules.

    >>> facts()["models"]["llama3-8b"]["hidden"], facts()["gpus"]["h100"]["node"]
    (4096, 8)
    """
    rules = {
        "scale": MEGATRON.scale_bytes, "ids": MEGATRON.ids_bytes, "logit": MEGATRON.logit_bytes,
        "loss": MEGATRON.loss_bytes, "workspace": MEGATRON.workspace_bytes,
        "expertWorkspace": MEGATRON.expert_workspace_bytes, "share": SHARE, "outside": OUTSIDE_BYTES,
    }  # fmt: skip
    time = {"attention": list(map(_points, MEGATRON_TIME.attention)), "tensorHidden": MEGATRON_TIME.tensor_hidden}
    time["pairFactor"] = MEGATRON_TIME.pair_factor
    return {
        "models": {name: _sizes(config) for name, config in models().items()},
        "gpus": {name: _card(cluster) for name, cluster in gpus().items()},
        "rules": rules,
        "time": time,
    }


def _sizes(config: ModelConfig) -> dict[str, Any]:
    dense = config if isinstance(config, LlamaConfig) else config.dense
    found = {
        "vocabulary": dense.vocabulary_size, "hidden": dense.hidden_size, "ffn": dense.ffn_size,
        "layers": dense.num_layers, "heads": dense.num_heads, "keyHeads": dense.num_kv_heads,
        "headSize": dense.size_of_head, "qkNorm": dense.qk_norm, "tied": dense.tied,
    }  # fmt: skip
    return found if isinstance(config, LlamaConfig) else found | _expert_sizes(config)


def _expert_sizes(config: V3MoEConfig) -> dict[str, Any]:
    """Return what a model with experts has on top; the page has no loss of a router and no queries without a latent."""
    experts = {
        "count": config.num_experts, "perToken": config.num_experts_per_token, "ffn": config.expert_ffn_size,
        "shared": config.num_shared_experts, "dense": config.num_dense_layers, "normalise": config.normalise,
        "sigmoid": config.scoring == "sigmoid",
    }  # fmt: skip
    assert config.balance == 0.0
    if config.latent is None:
        return {"experts": experts}
    sizes = config.latent
    assert sizes.query_rank is not None
    latent = {
        "query": sizes.query_rank, "kv": sizes.kv_rank, "content": sizes.content, "position": sizes.position,
        "value": sizes.value,
    }  # fmt: skip
    return {"experts": experts, "latent": latent}


def _card(cluster: Cluster) -> dict[str, Any]:
    unit = cluster.accelerator
    return {
        "name": unit.name, "node": cluster.ranks_per_node, "memory": unit.memory_bytes,
        "peak": unit.peaks["bfloat16"], "efficiency": _points(unit.efficiency_of("bfloat16")),
        "memoryBandwidth": unit.memory_bandwidth, "memoryEfficiency": _points(unit.memory_efficiency),
        "overhead": unit.overhead, "inside": _link(cluster.inside), "between": _link(cluster.between),
    }  # fmt: skip


def _link(link: LinkClass) -> dict[str, Any]:
    return {"bandwidth": link.bandwidth, "latency": link.latency, "efficiency": _points(link.efficiency)}


def _points(efficiency: Efficiency) -> list[list[float]]:
    return [list(point) for point in efficiency.points] or [[1, efficiency.value]]
