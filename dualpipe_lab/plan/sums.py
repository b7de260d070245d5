"""`sums_of`: who sums what with whom: for every kind of parameter its shards, copies, sums, norm and optimizer state.

Chapter: book/whole/sums.  In: a plan, a config.  Out: a table, one row per kind.
  a weight's gradient is summed over every axis along which ranks have other tokens and the same weight
  tp          a sharded weight has its full gradient; a copied one has a part of it wherever the tokens or the heads
              are sharded, which every backward sums, and the same gradient everywhere else
  mirrors     a stage on two ranks of pp adds both halves of the microbatches
  the norm    counts every element of the full model once: of copies, the first one's
Elsewhere: Megatron `finalize_model_grads`; `param_is_not_tensor_parallel_duplicate` in its norm.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.stage_rules import ModelConfig
from dualpipe_lab.plan.fields import PlanFields, text_table
from dualpipe_lab.plan.rules import has_experts, has_mtp

_HEADER = ("parameter", "sharded over", "copied over", "gradient summed over", "in the norm", "optimizer state")


@dataclass(frozen=True)
class Sum:
    """One sum of a gradient."""

    along: str  # the axes, or `mirrors`, `KV heads` (copies of one within tp), `tied stages`
    ranks: tuple[int, ...]  # of the first group
    num_groups: int  # with other parts of the model, or other copies

    def __str__(self) -> str:
        others = f" and {self.num_groups - 1} more" if self.num_groups > 1 else ""
        return f"{self.along} ({' '.join(map(str, self.ranks))}{others})"


@dataclass(frozen=True)
class ParameterSums:
    """One kind of parameter: where it lies, and who sums its gradient."""

    kind: str
    sharded: tuple[str, ...]  # the axes along which ranks hold different parts
    copied: tuple[str, ...]  # the axes along which ranks hold the same part
    sums: tuple[Sum, ...]  # of its gradient, in their order
    norm: str  # the ranks that count it
    state: str  # where its optimizer state lies

    def cells(self) -> tuple[str, ...]:
        """Return the row of the table."""
        sums = ", then ".join(map(str, self.sums)) or "-"
        axes = (", ".join(names) or "-" for names in (self.sharded, self.copied))
        return self.kind, *axes, sums, self.norm, self.state


@dataclass(frozen=True)
class SumsTable:
    """The reductions of one step under one plan: which ranks sum which gradients; prints as a table."""

    title: str
    rows: tuple[ParameterSums, ...]

    def of(self, kind: str) -> ParameterSums:
        """Return the row of a kind; ValueError for another kind."""
        for row in self.rows:
            if row.kind == kind:
                return row
        raise ValueError(f"there is no row {kind!r}; there are {', '.join(row.kind for row in self.rows)}")

    def __str__(self) -> str:
        table = [_HEADER, *(row.cells() for row in self.rows)]
        return f"{self.title}\n{text_table(table)}"

    def _repr_html_(self) -> str:
        style = 'style="text-align:left;padding:0.2rem 0.8rem"'
        head = "".join(f"<th {style}>{name}</th>" for name in _HEADER)
        body = "".join(
            "<tr>" + "".join(f"<td {style}>{escape(cell)}</td>" for cell in row.cells()) + "</tr>" for row in self.rows
        )
        caption = f"<caption>{escape(self.title)}</caption>"
        return f'<table class="dp-sums">{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def sums_of(plan: PlanFields, config: ModelConfig) -> SumsTable:
    """Return who sums what with whom when a model is trained under a plan that fits it."""
    return SumsTable(str(plan), tuple(_Rows(plan, config).rows()))


class _Rows:
    def __init__(self, plan: PlanFields, config: ModelConfig) -> None:
        self.plan, self.config, self.topology = plan, config, plan.topology
        self.last = plan.num_stages - 1

    def rows(self) -> Iterator[ParameterSums]:
        config, plan = self.config, self.plan
        latent = None if isinstance(config, LlamaConfig) else config.latent
        tied = isinstance(config, LlamaConfig) and config.tied
        kv_copies = 1 if latent is not None else max(plan.tp // config.num_kv_heads, 1)
        second = has_mtp(plan, config)  # its stage has a copy of the table
        is_shared = tied or (second and self.last > 0)
        ends = (0, self.last) if is_shared else (0,)
        yield self.row("tied embedding" if is_shared else "embedding", "tp", stages=ends)
        yield self.row("queries and output" if kv_copies > 1 else "attention", "tp")
        if kv_copies > 1:
            yield self.row("keys and values", "tp", kv_copies=kv_copies)
        if latent is not None:
            yield self.row("latents", None, is_partial=plan.sequence_parallel)
        yield self.row("norms", None, is_partial=plan.sequence_parallel)
        if config.qk_norm:
            yield self.row("norms of heads", None, is_partial=True)
        if isinstance(config, LlamaConfig) or config.num_dense_layers:
            yield self.row("dense ffn", "tp")
        if has_experts(config) and not isinstance(config, LlamaConfig):
            yield self.row("router", None, is_partial=plan.sequence_parallel)
            if config.num_shared_experts:
                yield self.row("shared expert", "tp")
            yield self.row("experts", "ep", is_partial=plan.sequence_parallel)
        if not tied:
            yield self.row("head", "tp", stages=(self.last,))
        if second:
            yield self.row("second token's projection", "tp", stages=(self.last,))

    def row(
        self,
        kind: str,
        axis: str | None,
        stages: tuple[int, ...] | None = None,
        kv_copies: int = 1,
        is_partial: bool = False,
    ) -> ParameterSums:
        """Return the row of a kind that is sharded along an axis; `stages` holds it, by default every one."""
        plan, homes = self.plan, self.plan.holders(0 if stages is None else stages[0])
        over = plan.expert_copy_axes if axis == "ep" else plan.copy_axes
        sharded = [name for name in ("pp",) if plan.pp > 1 and stages is None]
        sharded += [axis] if axis is not None and getattr(plan, axis) > 1 else []
        along_tp, is_tied = axis != "tp" and plan.tp > 1, stages is not None and len(set(stages)) > 1
        sums = []
        if kv_copies > 1:
            sums.append(Sum("KV heads", tuple(self.ranks("tp")[:kv_copies]), plan.world_size // kv_copies))
        if along_tp and is_partial:
            sums.append(Sum("tp", self.ranks("tp", home=homes[0]), self.groups(stages, ("tp",))))
        if len(homes) > 1:
            sums.append(Sum("mirrors", self.ranks_of(homes), self.groups(stages, ("pp",))))
        if len(ranks := self.ranks(*over, home=homes[0])) > 1:
            sums.append(Sum(" x ".join(over), ranks, self.groups(stages, over)))
        if is_tied:
            ends = tuple(home for stage in stages or () for home in plan.holders(stage))
            sums.append(Sum("tied stages", self.ranks_of(ends), plan.world_size // plan.pp))
        copied = [*over] if len(ranks) > 1 else []
        copied += ["tp"] * along_tp + ["KV heads"] * (kv_copies > 1) + ["mirrors"] * (len(homes) > 1)
        firsts = ["tp rank 0"] * along_tp + ["first copy of a KV head"] * (kv_copies > 1)
        firsts += ["first mirror"] * (len(homes) > 1) + ["first of the tied stages"] * is_tied
        if len(ranks) > 1:
            of_zero = "each shard on the first node" if plan.hybrid else "each its shard"
            firsts.append(of_zero if plan.zero else "first copy")
        norm, state = ", ".join(firsts) or "every rank", self.state(over, len(ranks))
        return ParameterSums(kind, tuple(sharded), tuple(copied), tuple(sums), norm, state)

    def state(self, over: tuple[str, ...], num_copies: int) -> str:
        if not self.plan.zero or num_copies == 1:
            return "in full on every copy" if num_copies > 1 else "with the weight"
        if self.plan.hybrid:
            return f"shards over the copies on a node ({' x '.join(over)})"
        return f"1 / {num_copies} on each of {' x '.join(over)}"

    def ranks_of(self, homes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self.topology.rank_at(pp=home) if home else 0 for home in homes))

    def ranks(self, *axes: str, home: int = 0) -> tuple[int, ...]:
        return self.topology.at(self.ranks_of((home,))[0]).ranks(*axes)

    def groups(self, stages: tuple[int, ...] | None, axes: tuple[str, ...]) -> int:
        holders = self.plan.pp if stages is None else len(self.plan.holders(stages[0]))
        size = len(self.plan.holders(0)) if axes == ("pp",) else len(self.ranks(*axes))
        return self.plan.world_size // self.plan.pp * holders // size
