"""The parts of a trainer in the order of the trail, each with the topic on whose page it is written; its runs."""

PARTS = {
    "memory": "memory",
    "ring": "ranks",
    "data": "data_parallel",
    "buckets": "dp_gradients",
    "zero1": "zero_1",
    "zero3": "zero_3",
    "column": "column_parallel",
    "row": "row_parallel",
    "tokens": "sequence_parallelism",
    "block": "block",
    "messages": "pp_basic",
    "rows_gpipe": "gpipe",
    "row_messages": "gpipe",
    "stage": "gpipe",
    "execute": "gpipe",
    "rows_1f1b": "one_f_one_b",
    "later": "zero_bubble",
    "rows_zb_h1": "zero_bubble",
    "softmax": "online_softmax",
    "ring_attention": "ring_attention",
    "exchange": "all_to_all",
    "moe": "smoe",
    "router": "v3_moe",
    "steps": "one_f_one_b_overlap",
    "pair": "one_f_one_b_overlap",
    "rows_dualpipe": "dualpipe",
    "rows_dualpipev": "dualpipev",
    "held": "cuts",
    "train": "cuts",
}
SHORT_WAY = (
    *("ring", "data", "zero1", "column", "row", "stage", "execute", "rows_1f1b", "later"),
    *("exchange", "moe", "rows_dualpipe"),
)
FAMILIES = {
    "start": ("memory", "ring"),
    "data": ("data", "buckets", "zero1", "zero3"),
    "tensors": ("column", "row", "tokens", "block"),
    "pipelines": (
        *("messages", "rows_gpipe", "row_messages", "stage", "execute", "rows_1f1b", "later", "rows_zb_h1"),
        *("rows_dualpipe", "rows_dualpipev"),
    ),
    "context": ("softmax", "ring_attention"),
    "experts": ("exchange", "moe", "router", "steps", "pair"),
    "all": ("held", "train"),
}
_PIPELINE = ("messages", "row_messages", "stage", "execute", "later")
_EXPERTS = ("softmax", "ring_attention", "exchange", "moe", "router")
RUNS = {  # the parts that each calls
    "dense": ("ring", "data", "buckets", "zero1", "zero3", "column", "row", "tokens", "block"),
    "pipeline": (
        *("memory", "ring", "data", "column", "row", "block", *_PIPELINE),
        *("rows_gpipe", "rows_1f1b", "rows_zb_h1"),
    ),
    "experts": ("ring", "column", "block", *_EXPERTS),
    "together": (
        *("ring", "data", "zero1", "column", "tokens", "block", *_PIPELINE, *_EXPERTS),
        *("steps", "pair", "rows_dualpipe", "rows_dualpipev", "held", "train"),
    ),
}
VERSIONS: dict[str, int] = {}  # of parts whose signature has changed: an older file keeps its mark, and ours runs
_ORDER = list(PARTS)


def before(part: str) -> list[str]:
    """The parts that a part may import.

    >>> before("buckets")
    ['memory', 'ring', 'data']
    """
    return _ORDER[: _ORDER.index(part)]


def version(part: str) -> int:
    """Of the signature of a part."""
    return VERSIONS.get(part, 1)


def number_of(run: str) -> str:
    """The name under which a run is recorded and marked.

    >>> number_of("pipeline")
    'runs-2'
    """
    return f"runs-{list(RUNS).index(run) + 1}"
