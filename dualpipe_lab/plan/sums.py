"""`sums_of`: who sums what with whom: for every kind of parameter its shards, copies, sums, norm and optimizer state.

Chapter: book/whole/sums.  In: a plan, a config.  Out: a table, one row per kind.
The sums are those of `dualpipe_lab.dp.sums`, which the runtime and the optimizers execute; before them, along tp, a
copied weight has a part of its gradient wherever tokens or heads are sharded, and every backward sums the parts.
The norm counts every element of the full model once: of copies, the first one's.
Elsewhere: Megatron `finalize_model_grads`; `param_is_not_tensor_parallel_duplicate` in its norm.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from dualpipe_lab.dp.sums import BACKWARD, GradientSum, ParamSpec
from dualpipe_lab.dp.sums import sums_of as sums_on_rank
from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.stage_rules import ModelConfig
from dualpipe_lab.plan.fields import PlanFields, text_table
from dualpipe_lab.plan.rules import has_experts, has_mtp

_FIRST = {  # who of those that add is in the norm
    "KV heads": "first copy of a KV head",
    "mirrors": "first mirror",
    "tied stages": "first of the tied stages",
}
_HEADER = ("parameter", "sharded over", "copied over", "gradient summed over", "in the norm", "optimizer state")


@dataclass(frozen=True)
class ParameterSums:
    """One kind of parameter: where it lies, and who sums its gradient."""

    kind: str
    sharded: tuple[str, ...]  # the axes along which ranks hold different parts
    copied: tuple[str, ...]  # the axes along which ranks hold the same part
    num_ranks: int  # that hold it
    sums: tuple[GradientSum, ...]  # of its gradient, in their order, on the first of these ranks
    norm: str  # the ranks that count it
    state: str  # where its optimizer state lies

    def cells(self) -> tuple[str, ...]:
        """Return the row of the table."""
        sums = ", then ".join(map(self._text, self.sums)) or "-"
        axes = (", ".join(names) or "-" for names in (self.sharded, self.copied))
        return self.kind, *axes, sums, self.norm, self.state

    def _text(self, one: GradientSum) -> str:
        others = self.num_ranks // len(one.ranks) - 1  # groups with other parts of the model, or other copies
        return f"{one.why} ({' '.join(map(str, one.ranks))}{f' and {others} more' if others else ''})"


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
        self.holders = {stage: plan.holders(stage) for stage in range(plan.num_stages)}

    def rows(self) -> Iterator[ParameterSums]:
        config, plan, last = self.config, self.plan, self.plan.num_stages - 1
        latent = None if isinstance(config, LlamaConfig) else config.latent
        tied = isinstance(config, LlamaConfig) and config.tied
        kv_copies = 1 if latent is not None else max(plan.tp // config.num_kv_heads, 1)
        second = has_mtp(plan, config)  # its stage has a copy of the table
        is_shared = tied or (second and last > 0)
        by_tokens = plan.tp if plan.sequence_parallel else 1
        yield self.row("tied embedding" if is_shared else "embedding", "tp", stages=(0, last) if is_shared else (0,))
        yield self.row("queries and output" if kv_copies > 1 else "attention", "tp")
        if kv_copies > 1:
            yield self.row("keys and values", "tp", parts=kv_copies)
        if latent is not None:
            yield self.row("latents", None, parts=by_tokens)
        yield self.row("norms", None, parts=by_tokens)
        if config.qk_norm:
            yield self.row("norms of heads", None, parts=plan.tp)
        if isinstance(config, LlamaConfig) or config.num_dense_layers:
            yield self.row("dense ffn", "tp")
        if has_experts(config) and not isinstance(config, LlamaConfig):
            yield self.row("router", None, parts=by_tokens)
            if config.num_shared_experts:
                yield self.row("shared expert", "tp")
            yield self.row("experts", "ep", parts=by_tokens)
        if not tied:
            yield self.row("head", "tp", stages=(last,))
        if second:
            yield self.row("second token's projection", "tp", stages=(last,))

    def row(self, kind: str, axis: str | None, stages: tuple[int, ...] = (), parts: int = 1) -> ParameterSums:
        """Return the row of a kind that is sharded along an axis.

        `stages` holds it, by default every one; so many ranks of tp have `parts` of its gradient, which the layers sum.
        """
        plan, homes = self.plan, self.holders[stages[0] if stages else 0]
        here = self.topology.at(self.topology.rank_at(pp=homes[0]) if homes[0] else 0)
        axes = (axis,) if axis is not None and getattr(plan, axis) > 1 else ()
        tied = stages if len(set(stages)) > 1 else ()
        sums = sums_on_rank([ParamSpec(kind, (), None, axes, 0, homes, tied)], here, self.holders, plan.hybrid)
        if parts > 1:
            why = "KV heads" if axis == "tp" else "tp"
            sums = (GradientSum(why, here.ranks("tp")[:parts], (kind,), BACKWARD), *sums)
        holding = {rank for stage in stages for rank in self.holders[stage]} if stages else range(plan.pp)
        over = plan.expert_copy_axes if axis == "ep" else plan.copy_axes
        along_tp, num_copies = axis != "tp" and plan.tp > 1, len(here.ranks(*over))
        copied = [*over] * (num_copies > 1) + ["tp"] * along_tp
        copied += [one.why for one in sums if one.why in ("KV heads", "mirrors")]
        firsts = ["tp rank 0"] * along_tp + [_FIRST[one.why] for one in sums if one.why in _FIRST]
        if num_copies > 1:
            of_zero = "each shard on the first node" if plan.hybrid else "each its shard"
            firsts.append(of_zero if plan.zero else "first copy")
        return ParameterSums(
            kind,
            sharded=(*(("pp",) if plan.pp > 1 and not stages else ()), *axes),
            copied=tuple(copied),
            num_ranks=plan.world_size // plan.pp * len(holding),
            sums=sums,
            norm=", ".join(firsts) or "every rank",
            state=self.state(over, num_copies),
        )

    def state(self, over: tuple[str, ...], num_copies: int) -> str:
        if not self.plan.zero or num_copies == 1:
            return "in full on every copy" if num_copies > 1 else "with the weight"
        if self.plan.hybrid:
            return f"shards over the copies on a node ({' x '.join(over)})"
        return f"1 / {num_copies} on each of {' x '.join(over)}"
