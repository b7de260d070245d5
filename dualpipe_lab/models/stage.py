"""`TransformerStage`: some layers of a model, with the embedding before the first and the head behind the last.

Chapter: book/whole/cuts.  In: a config, a `Sharing`, a range of layers.  Out: a module.
  stage      in                       out
  first      ids_BS                   x_BSD
  others     x_BSD                    x_BSD
  last                                logits_BSV of this rank's shard of the vocabulary; with `loss_chunk` x_BSD, the
                                      input of the head, which computes logits within the loss, chunk by chunk
Under sequence parallelism a rank holds S / t tokens between the layers, so stages exchange 1 / t of the bytes.
Parameters are drawn by their names in the full model, so every cut starts from the same numbers.  Where the head uses
the embedding's table and stands on another stage, each of the two stages has the gradient of its own use.
Elsewhere: Megatron `GPTModel(pre_process=, post_process=)`; torchtitan `pipeline_module_split`.
"""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dualpipe_lab.cp.latent_ring import LatentRing
from dualpipe_lab.cp.layouts import SequenceLayout
from dualpipe_lab.cp.sequence import positions as positions_of
from dualpipe_lab.launch import context
from dualpipe_lab.launch.mesh import Mesh
from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.parameters import HEAD, TABLE
from dualpipe_lab.models.stage_rules import ModelConfig, check_sizes
from dualpipe_lab.pp.runtime.recompute import recompute
from dualpipe_lab.topology import Topology
from dualpipe_lab.tp.chunked_cross_entropy import check_chunk
from dualpipe_lab.tp.embedding import VocabParallelEmbedding
from dualpipe_lab.tp.gqa import Attend, causal_attention, kv_replicas
from dualpipe_lab.tp.lm_head import LMHead
from dualpipe_lab.tp.rms_norm import RMSNorm
from dualpipe_lab.tp.shard import TensorParallel, full_tensor, initialize_parameters, shards_of


class Sharing:
    """How a model is shared among ranks: the same for all stages of one rank; every rank of the world makes it.

    Attributes:
        mesh: the ranks.
        tp: the ranks that share a layer, and how.
        replicas: the ranks that hold the same KV heads; None if KV heads are not replicated.
        attend, layout, recompute, dtype, loss_chunk: as in `Llama` and `build_stages`.
    """

    def __init__(
        self,
        config: LlamaConfig,
        mesh: Mesh,
        tp: TensorParallel,
        attend: Attend | None = None,
        layout: SequenceLayout | None = None,
        recompute: bool = False,
        dtype: torch.dtype | None = None,
        loss_chunk: int | None = None,
    ) -> None:
        if loss_chunk is not None:
            check_chunk(loss_chunk)
        check_layout(mesh.topology, layout)
        if attend is None:
            attend = causal_attention if layout is None else LatentRing(layout, mesh.group("cp"))
        self.mesh, self.tp, self.attend, self.layout, self.recompute = mesh, tp, attend, layout, recompute
        self.dtype, self.loss_chunk = dtype, loss_chunk
        self.replicas = kv_replicas(config.num_kv_heads, tp)


class TransformerStage(nn.Module):
    """Layers of a model that one rank runs one after another; the base of the stages of all models.

    Args:
        config: of attention, embedding and head.
        sharing: what all stages of this rank share.
        layers: numbers of the layers in the full model; the attribute iterates in their order.
        make_layer: makes a layer, given its number.
        is_first, is_last: whether the embedding, and whether the last norm and the head are here.

    Attributes:
        num_sequences, num_tokens: of the step, as in `RankModel.begin_step`; None before it.
        tied_names: names here whose parameter has another name in the full model: that of the table that is tied.
    """

    names_start_here: ClassVar[bool] = True

    def __init__(
        self,
        config: LlamaConfig,
        sharing: Sharing,
        layers: range,
        make_layer: Callable[[int], nn.Module],
        is_first: bool = True,
        is_last: bool = True,
    ) -> None:
        super().__init__()
        tp, dtype = sharing.tp, sharing.dtype
        self._config, self.mesh, self.layout, self.tp = config, sharing.mesh, sharing.layout, tp
        self.recompute, self.dtype, self.loss_chunk = sharing.recompute, dtype, sharing.loss_chunk
        self.num_sequences: int | None = None
        self.num_tokens: int | None = None
        sizes = config.vocabulary_size, config.hidden_size
        self.embedding = VocabParallelEmbedding(*sizes, tp=tp, dtype=dtype) if is_first else None
        self.layers = nn.ModuleList()
        for number in layers:
            self.layers.add_module(str(number), make_layer(number))
        self.norm = make_norm(config, tp, dtype) if is_last else None
        table = self.embedding if config.tied else None
        self.head = (
            LMHead(config.hidden_size, config.vocabulary_size, tp=tp, tied=table, dtype=dtype) if is_last else None
        )
        self.tied_names = {HEAD: TABLE} if config.tied and is_last and not is_first else {}

    def draw(self, seed: int) -> None:
        """Draw all parameters by their names in the full model, on the CPU, and move them to the rank's device."""
        initialize_parameters(self, seed)
        for here, there in self.tied_names.items():
            module = self.get_submodule(here.rpartition(".")[0])
            initialize_parameters(nn.ModuleDict({there.rpartition(".")[0]: module}), seed)
        self.to(context.device())

    def enter(self, x: Tensor) -> Tensor:
        """Return the input of this stage's layers: of the first stage, the embedding of the ids."""
        if self.embedding is None:
            return x
        if self.tp.sequence_parallel:
            self._config.check(self.tp.size, x.shape[1])
        out: Tensor = self.embedding(x)
        return out

    def run(self, layer: nn.Module, *inputs: Any) -> Any:
        """Run a layer; with `recompute`, keep its inputs alone."""
        return recompute(layer, *inputs) if self.recompute else layer(*inputs)

    def leave(self, x: Tensor) -> Tensor:
        """Return the output of this stage, given the output of its layers: on the last stage, what `loss_of` takes."""
        return x if self.norm is None else self.scored(self.norm(x))

    def scored(self, x: Tensor) -> Tensor:
        """Return what `loss_of` takes, of the head's input `x_BSD`: its logits, or with `loss_chunk` x itself."""
        return x if self.loss_chunk is not None else self.logits_of(x)

    def logits_of(self, x: Tensor) -> Tensor:
        """Return the logits of the head's input, `logits_BSV` of `x_BSD`."""
        logits: Tensor = self._known_head()(x)
        return logits

    def positions(self, device: torch.device) -> Tensor | None:
        """Return the positions of this rank's tokens in their sequence; None for 0, 1, 2 ..."""
        return None if self.layout is None else positions_of(self.layout, self.mesh.rank("cp"), device)

    def loss_of(self, output: Tensor, targets: Tensor, **options: Any) -> Tensor:
        """Compute the loss of the last stage's output; `options` are those of `tp.cross_entropy`."""
        head = self._known_head()
        if self.loss_chunk is not None:
            return head.loss(output, targets, self.loss_chunk, **options)
        return head.loss_of(output, targets, **options)

    def _known_head(self) -> LMHead:
        if self.head is None:
            raise ValueError("the last stage has the head and computes the loss; this stage has layers alone")
        return self.head

    def gathered(self, of: str) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter, or with "grad" every gradient, in full; of a tied table the embedding's alone."""
        shards = shards_of(self)
        for name, parameter in self.named_parameters():
            tensor = parameter if of == "parameter" else parameter.grad
            if tensor is not None and name not in self.tied_names:
                group = self.mesh.group("ep") if ".experts." in name else self.tp.group
                yield name, full_tensor(tensor, shards.get(name), group)


def make_norm(config: LlamaConfig, tp: TensorParallel, dtype: torch.dtype | None) -> RMSNorm:
    """Make a norm; under sequence parallelism the gradient of its weight is summed over the ranks' tokens."""
    return RMSNorm(
        config.hidden_size, config.eps, tp=tp, sharded="tokens" if tp.sequence_parallel else "none", dtype=dtype
    )


def check_topology(config: ModelConfig, topology: Topology, layout: SequenceLayout | None = None) -> None:
    """Refuse a topology over which a model with all layers cannot be sharded; ValueError names rule and values."""
    if topology.size("pp") > 1:
        rule = "a Llama is sharded along tp" if isinstance(config, LlamaConfig) else "a V3MoE is sharded along ep, tp"
        raise ValueError(
            f"{rule} and cp and replicated along dp, got pp {topology.size('pp')} in {topology.shape} ranks; for pp "
            "use build_stages"
        )
    check_layout(topology, layout)
    check_sizes(config, topology)


def check_layout(topology: Topology, layout: SequenceLayout | None) -> None:
    """Refuse a layout that is missing along cp, or made for another number of ranks."""
    cp_size = topology.size("cp")
    if cp_size != (1 if layout is None else layout.num_ranks):
        raise ValueError(
            f"{topology.shape} ranks share a sequence along cp {cp_size}, got layout={layout}; "
            f"make_layout(name, length, num_ranks={cp_size})"
        )
