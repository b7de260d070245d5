"""The checks that exercises call: `from dualpipe_course import check`, then `check.gpipe.makespan(answer)`.

One module per chapter, in the same folders as the chapters.  Each check takes the learner's answer, tries cases from
the smallest to the adversarial, looks at the mechanism, and prints one stable line or raises `CheckFailed`.
`check.gpipe.hint()` gives the next hint, `check.progress()` shows what is solved.
"""

from importlib import import_module
from typing import Any

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
    "project": "whole.project",
    "many_hosts": "hosts.many_hosts",
    "placing": "hosts.placing",
    "failures": "hosts.failures",
}
_NAMES = {"CheckFailed": "exercise", "progress": "progress_page", "all_checks": "registry", "topic": "registry"}


def __getattr__(name: str) -> Any:
    if name in TOPICS:
        return import_module(f"dualpipe_course.{TOPICS[name]}")
    if name in _NAMES:
        return getattr(import_module(f"dualpipe_course.{_NAMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; there are checks for {', '.join(TOPICS)}")


def __dir__() -> list[str]:
    return sorted([*globals(), *TOPICS, *_NAMES])
