"""`LlamaConfig`: the sizes of a Llama, and the rules by which they are sharded; needs no rank and no torch.

Chapter: book/tp/block.  In: sizes.  Out: checked sizes.
"""

from dataclasses import dataclass
from functools import cached_property

from dualpipe_lab.tp.closed_forms import check_heads, layer_parameters
from dualpipe_lab.tp.rope_scaling import Scaling


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a full Llama model.

    Attributes:
        vocabulary_size, hidden_size, ffn_size, num_layers, num_heads, num_kv_heads: the usual sizes.
        head_size: of one head; None for hidden_size / num_heads.
        rope_base: of the rotary angles.
        eps: of the norms.
        qk_norm: normalise each head's queries and keys.
        tied: the head uses the embedding's table.
        rope_scaling: of the rotary angles, as in Llama 3.1, or by yarn; None for none.

    >>> LlamaConfig(num_heads=6, hidden_size=48).check(tp_size=4)
    Traceback (most recent call last):
    ValueError: num_heads must divide among the ranks, got 6 on 4 ranks
    """

    vocabulary_size: int = 256
    hidden_size: int = 64
    ffn_size: int = 160
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int | None = None
    rope_base: float = 10_000.0
    eps: float = 1e-6
    qk_norm: bool = False
    tied: bool = False
    rope_scaling: Scaling | None = None

    @property
    def size_of_head(self) -> int:
        """Features of one head."""
        return self.head_size or self.hidden_size // self.num_heads

    @cached_property
    def layer_costs(self) -> tuple[int, ...]:
        """The cost of each layer for `pp.partition`: its parameters, all of which every token uses.

        >>> LlamaConfig(hidden_size=8, ffn_size=16, num_layers=2).layer_costs
        (592, 592)
        """
        heads = (self.num_heads, self.num_kv_heads, self.size_of_head)
        return (layer_parameters(self.hidden_size, self.ffn_size, *heads, 1),) * self.num_layers

    def check(self, tp_size: int = 1, num_tokens: int | None = None) -> None:
        """Refuse sizes that cannot be sharded over `tp_size` ranks; ValueError names the rule and the values.

        `num_tokens`: of a sequence, under sequence parallelism.
        """
        sizes = (self.vocabulary_size, self.hidden_size, self.ffn_size, self.num_heads, self.num_kv_heads, tp_size)
        if min(sizes) < 1 or self.num_layers < 0:
            raise ValueError(f"sizes count from 1 and layers from 0, got {self} on {tp_size} ranks")
        if not (self.eps >= 0 and self.rope_base > 0):
            raise ValueError(f"norms need eps of at least 0 and angles a rope_base above 0, got {self}")
        check_heads(self.hidden_size, self.num_heads, self.num_kv_heads, tp_size, self.head_size)
        if num_tokens is not None and num_tokens % tp_size:
            raise ValueError(
                f"sequence parallelism shards a sequence evenly, got {num_tokens} tokens on {tp_size} ranks; pad it to "
                f"{-(-num_tokens // tp_size) * tp_size}"
            )

    def num_parameters(self, tp_size: int = 1) -> int:
        """Return the number of parameters per rank, for sizes that divide among the ranks; those of `qk_norm` left out.

        >>> LlamaConfig().num_parameters(), LlamaConfig().num_parameters(tp_size=2)
        (119104, 59712)
        """
        heads = (self.num_heads, self.num_kv_heads, self.size_of_head)
        layers = self.num_layers * layer_parameters(self.hidden_size, self.ffn_size, *heads, tp_size)
        tables = (1 if self.tied else 2) * self.vocabulary_size * self.hidden_size // tp_size
        return layers + tables + self.hidden_size
