"""All checks, topic by topic: what notebooks, the progress page, the grader and the tests go through."""

from functools import cache
from importlib import import_module
from typing import Any

from dualpipe_course.exercise import Check, hint_of

TOPICS = {
    "memory": "start.memory",
    "speed": "start.speed",
    "ranks": "start.ranks",
    "time": "start.time",
    "data_parallel": "dp.data_parallel",
    "dp_gradients": "dp.dp_gradients",
    "distributed_adam": "dp.distributed_adam",
    "zero_1": "dp.zero_1",
    "zero_2": "dp.zero_2",
    "zero_3": "dp.zero_3",
    "mixed_precision_adam": "dp.mixed_precision_adam",
    "mixed_precision_options": "dp.mixed_precision_options",
    "io": "dp.io",
    "crash_safety": "dp.crash_safety",
    "topology": "dp.topology",
    "hybrid_zero": "dp.hybrid_zero",
    "column_parallel": "tp.column_parallel",
    "row_parallel": "tp.row_parallel",
    "sequence_parallelism": "tp.sequence_parallelism",
    "swiglu": "tp.swiglu",
    "gqa": "tp.gqa",
    "latent_attention": "tp.latent_attention",
    "lm_head": "tp.lm_head",
    "embedding": "tp.embedding",
    "rmsnorm": "tp.rmsnorm",
    "cross_entropy": "tp.cross_entropy",
    "chunked_loss": "tp.chunked_loss",
    "block": "tp.block",
    "pp_basic": "pp.pp_basic",
    "gpipe": "pp.gpipe",
    "gradient_checkpointing": "pp.gradient_checkpointing",
    "one_f_one_b": "pp.one_f_one_b",
    "pipedream": "pp.pipedream",
    "interleaved": "pp.interleaved",
    "zero_bubble": "pp.zero_bubble",
    "easy_dualpipe": "pp.easy_dualpipe",
    "dualpipe": "pp.dualpipe",
    "dualpipev": "pp.dualpipev",
    "dualpipe_overlap": "pp.dualpipe_overlap",
    "dualpipe_copies": "pp.dualpipe_copies",
    "v_shapes": "pp.v_shapes",
    "two_towers": "pp.two_towers",
    "studio": "pp.studio",
    "all_to_all": "ep.all_to_all",
    "async_all_to_all": "ep.async_all_to_all",
    "smoe": "ep.smoe",
    "ring_all_reduce": "cp.ring_all_reduce",
    "softmax": "cp.softmax",
    "online_softmax": "cp.online_softmax",
    "ring_softmax": "cp.ring_softmax",
    "flash_attention": "cp.flash_attention",
    "ring_attention": "cp.ring_attention",
    "ring_layouts": "cp.ring_layouts",
    "topk_gradient": "ep.topk_gradient",
    "v3_moe": "ep.v3_moe",
    "one_f_one_b_basic": "ep.one_f_one_b_basic",
    "one_f_one_b_overlap": "ep.one_f_one_b_overlap",
    "gshard": "ep.gshard",
    "eplb": "ep.eplb",
    "sums": "whole.sums",
    "links": "whole.links",
    "cuts": "whole.cuts",
    "training": "whole.training",
    "weights": "whole.weights",
    "lora": "whole.lora",
    "two_tokens": "whole.two_tokens",
    "deepseek": "whole.deepseek",
    "museum": "whole.museum",
    "plan_your_run": "whole.plan_your_run",
    "many_hosts": "hosts.many_hosts",
    "placing": "hosts.placing",
    "failures": "hosts.failures",
}


class Chapter:
    """The checks of one chapter by name, as in `check.gpipe.makespan`, and their hints."""

    def __init__(self, name: str) -> None:
        self.module = import_module(f"dualpipe_course.{TOPICS[name]}")
        found = [value for value in vars(self.module).values() if isinstance(value, Check)]
        self._checks = sorted(found, key=lambda check: (check.kind != "part", int(check.name.rpartition("-")[2])))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def __dir__(self) -> list[str]:
        return [*(name for name, value in vars(self.module).items() if value in self._checks), "hint"]

    def hint(self, exercise: int | str | None = None) -> None:
        """Print the next hint for an exercise, by its number or as the part that it is, or for the first unsolved."""
        hint_of(self._checks, exercise)


@cache
def chapter(name: str) -> Chapter:
    """What `check.<name>` is."""
    return Chapter(name)


def topic(name: str) -> list[Check]:
    """The checks of one topic: parts of the trainer, then the others, each in the order of their numbers."""
    return list(chapter(name)._checks)


def all_checks() -> list[Check]:
    """Every check of the course."""
    return [check for name in TOPICS for check in topic(name)]


def find(name: str) -> Check | None:
    """The check of an exercise such as `gpipe-4`, if there is one."""
    of = name.rpartition("-")[0]
    return next((check for check in topic(of) if check.name == name), None) if of in TOPICS else None
