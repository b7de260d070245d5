"""Exercises that the course no longer has, and the page to which the address of each leads.

In: the name of an exercise, or of its notebook.  Out: a page.  `progress`, `grade` and `fresh` know them.
"""

RETIRED = {
    "moving_experts-1": "book/ep/eplb",
    "moving_experts-2": "book/ep/eplb",
    "moving_experts-3": "book/ep/eplb",
    "ring_softmax-3": "book/cp/ring-softmax",
    "training-4": "book/whole/training",
    "museum-4": "book/whole/museum",
    "sums-4": "book/whole/sums",
    "zero_1-2": "book/dp/zero-1",
    "zero_1-1": "book/dp/zero-1",
    "zero_3-1": "book/dp/zero-3",
    "zero_3-2": "book/dp/zero-3",
    "column_parallel-1": "book/tp/column-parallel",
    "column_parallel-2": "book/tp/column-parallel",
    "row_parallel-1": "book/tp/row-parallel",
    "row_parallel-2": "book/tp/row-parallel",
    "links-3": "book/whole/links",
    "placing-3": "book/hosts/placing",
    "sums-3": "book/whole/sums",
    "training-3": "book/whole/training",
    "zero_2-4": "book/dp/zero-2",
    "deepseek-3": "book/whole/deepseek",
    "cuts-3": "book/whole/cuts",
    "time-2": "book/start/time",
    "distributed_adam-2": "book/dp/zero-1",
    "distributed_adam-4": "book/dp/zero-1",
    "zero_2-2": "book/dp/dp-gradients",
    "hybrid_zero-2": "book/dp/hybrid-zero",
    "weights-2": "book/tp/gqa",
    "embedding-3": "book/tp/embedding",
    "cross_entropy-4": "book/tp/cross-entropy",
    "chunked_loss-2": "book/cp/online-softmax",
    "interleaved-4": "book/pp/one-f-one-b",
    "pipedream-2": "book/pp/one-f-one-b",
    "pipedream-3": "book/pp/gpipe",
    "easy_dualpipe-3": "book/pp/gpipe",
    "dualpipe_copies-2": "book/whole/cuts",
    "dualpipe_overlap-2": "book/ep/one-f-one-b-overlap",
    "two_towers-3": "book/pp/two-towers",
    "async_all_to_all-2": "book/ep/async-all-to-all",
    "ring_all_reduce-3": "book/start/ranks-and-messages",
    "flash_attention-2": "book/cp/online-softmax",
    "gshard-3": "book/ep/all-to-all",
    "eplb-4": "book/ep/eplb",
    "sums-2": "book/whole/cuts",
    "links-2": "book/hosts/placing",
    "lora-2": "book/whole/lora",
    "two_tokens-2": "book/whole/two-tokens",
    "deepseek-2": "book/ep/one-f-one-b-overlap",
    "plan_your_run-2": "book/whole/plan-your-run",
    "many_hosts-3": "book/hosts/many-hosts",
    "failures-2": "book/dp/io",
    "crash_safety-3": "book/dp/crash-safety",
    "sequence_parallelism-1": "book/tp/sequence-parallelism",
    "sequence_parallelism-2": "book/tp/sequence-parallelism",
    "block-1": "book/tp/block",
    "block-2": "book/tp/block",
    "pp_basic-1": "book/pp/pp-basic",
    "pp_basic-2": "book/pp/pp-basic",
    "one_f_one_b-1": "book/pp/one-f-one-b",
    "one_f_one_b-2": "book/pp/one-f-one-b",
    "v3_moe-1": "book/ep/v3-moe",
    "v3_moe-2": "book/ep/v3-moe",
    "one_f_one_b_overlap-1": "book/ep/one-f-one-b-overlap",
    "one_f_one_b_overlap-2": "book/ep/one-f-one-b-overlap",
    "gpipe-1": "book/pp/gpipe",
    "gpipe-2": "book/pp/gpipe",
    "gpipe-3": "book/pp/gpipe",
    "zero_bubble-1": "book/pp/zero-bubble",
    "zero_bubble-2": "book/pp/zero-bubble",
}


def page_of(topic: str) -> str:
    """Return the page that took the place of a retired topic's exercises, or nothing for another topic.

    >>> page_of("moving_experts"), page_of("moving-experts"), page_of("eplb")
    ('book/ep/eplb', 'book/ep/eplb', '')
    """
    name = topic.replace("-", "_")
    return next((page for exercise, page in RETIRED.items() if exercise.rpartition("-")[0] == name), "")
