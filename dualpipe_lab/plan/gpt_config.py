"""`GptConfig`: the sizes of a GPT as the papers on parallelism have them, for estimates; no runtime here trains one.

In: sizes.  Out: checked sizes, the numbers of parameters that a rank holds.
  layer      attention of h (a + 2 a_kv) d inputs and a d h outputs, a network of two matrices of h f, two layer norms
  biases     of every product and norm: those behind a sum over tp are on every rank
  table      of tokens, sharded along tp, and of positions, on every rank
Elsewhere: Megatron `GPTModel` with `--position-embedding-type learned_absolute`; transformers `GPT2Config`.
Source: Shoeybi et al. 2019 (arXiv 1909.08053), section 3.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.stage_rules import stage_layers
from dualpipe_lab.plan.fields import PlanFields
from dualpipe_lab.plan.gradient_traffic import TIED, Held, Part
from dualpipe_lab.sharding import shard_slice

_FIELDS = {
    "vocab_size": "vocabulary_size",
    "n_embd": "hidden_size",
    "n_layer": "num_layers",
    "n_head": "num_heads",
    "n_positions": "num_positions",
}


@dataclass(frozen=True)
class GptConfig:
    """Sizes of a full GPT.

    Attributes:
        vocabulary_size, hidden_size, num_layers, num_heads: the usual sizes.
        num_kv_heads: key heads, None for one per head.
        ffn_size: of the network, None for four times the hidden size.
        num_positions: learned positions, None for none.
        tied: the head uses the embedding's table.

    >>> GptConfig(50257, 768, 12, 12, num_positions=1024).num_parameters()
    124439808
    """

    vocabulary_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None
    ffn_size: int | None = None
    num_positions: int | None = None
    tied: bool = True

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> "GptConfig":
        """Return the sizes of a GPT-2, of the values of its config.json.

        Raises:
            ValueError: a field that is missing or is no whole number.

        >>> values = {"vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}
        >>> GptConfig.from_fields(values).num_layers
        12
        """
        for name in _FIELDS:
            if type(values.get(name)) is not int:
                raise ValueError(f"config.json needs {name} as a whole number, got {values.get(name)!r}")
        sizes = {ours: values[theirs] for theirs, ours in _FIELDS.items()}
        return cls(**sizes, ffn_size=values.get("n_inner"), tied=values.get("tie_word_embeddings", True))

    @property
    def outline(self) -> LlamaConfig:
        """The Llama with these sizes: the rules of a plan and the layers of its stages are those of that model."""
        return LlamaConfig(
            self.vocabulary_size,
            self.hidden_size,
            self.inner_size,
            self.num_layers,
            self.num_heads,
            self.num_key_heads,
            tied=self.tied,
        )

    @property
    def inner_size(self) -> int:
        """Features between the two matrices of the network."""
        return self.ffn_size or 4 * self.hidden_size

    @property
    def num_key_heads(self) -> int:
        """The number of heads of keys and values."""
        return self.num_kv_heads or self.num_heads

    def num_parameters(self) -> int:
        """Return the number of parameters of the full model."""
        return sum(part.numel for part in gpt_parts(PlanFields(), self, 0, 0))


def gpt_parts(plan: PlanFields, config: GptConfig, pp_rank: int, tp_rank: int) -> list[Part]:
    """Return the parameters of the ranks at a place along pp and tp, in the order of the modules.

    The stages of a tied table at both ends of a pipeline have a copy each.
    """
    shares = stage_layers(config.outline, plan.num_stages, plan.layers)
    maker = _Parts(config, plan.tp, tp_rank)
    found: list[Part] = []
    for stage in plan.stages(pp_rank):
        mirror = frozenset({"mirror"}) if plan.holders(stage)[0] != pp_rank else frozenset[str]()
        units = maker.stage(len(shares[stage]), stage == 0, stage == plan.num_stages - 1)
        found += [
            Part(stage, number, numel, kind | mirror) for number, unit in enumerate(units) for numel, kind in unit
        ]
    return found


class _Parts:
    """Elements and kinds of the parameters of one rank of tp, by unit."""

    def __init__(self, config: GptConfig, tp: int, tp_rank: int) -> None:
        self.config, self.tp, self.tp_rank = config, tp, tp_rank

    def stage(self, num_layers: int, is_first: bool, is_last: bool) -> Iterator[list[Held]]:
        """Yield the units of a stage: embedding, layers, norm, head."""
        config, copied = self.config, frozenset[str]()
        numel, kind = self.shard(config.vocabulary_size, config.hidden_size)
        table = (numel, kind | {TIED}) if config.tied and is_first != is_last else (numel, kind)
        if is_first:
            positions = [] if config.num_positions is None else [(config.num_positions * config.hidden_size, copied)]
            yield [table, *positions]
        for _ in range(num_layers):
            yield list(self.layer())
        if is_last:
            yield [(config.hidden_size, copied)] * 2
            yield [] if config.tied and is_first else [table]

    def layer(self) -> Iterator[Held]:
        """Yield those of one layer."""
        config, hidden = self.config, self.config.hidden_size
        head = hidden // config.num_heads
        heads = config.num_heads // self.tp + 2 * max(config.num_key_heads // self.tp, 1)
        kind, bias = frozenset({"tp"} if self.tp > 1 else ()), (hidden, frozenset[str]())
        yield from [bias] * 2  # of the norm: weight and bias
        yield from [(heads * head * hidden, kind), (heads * head, kind)]
        yield from [self.shard(config.num_heads * head, hidden), bias]
        yield from [bias] * 2
        yield from [self.shard(config.inner_size, hidden), self.shard(config.inner_size)]
        yield from [self.shard(config.inner_size, hidden), bias]

    def shard(self, length: int, *others: int) -> Held:
        """Return elements and kind of this rank's shard along a dimension."""
        part = shard_slice(length, self.tp, self.tp_rank)
        return (part.stop - part.start) * prod(others), frozenset({"tp"} if self.tp > 1 else ())
