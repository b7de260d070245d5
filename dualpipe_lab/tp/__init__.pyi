# The ranks that share a layer, and the conjugate operators at its borders
from .shard import TensorParallel as TensorParallel
from .mappings import copy_to_ranks as copy_to_ranks
from .mappings import reduce_from_ranks as reduce_from_ranks
from .mappings import gather_from_ranks as gather_from_ranks
from .mappings import slice_to_ranks as slice_to_ranks
from .mappings import gather_tokens as gather_tokens
from .mappings import reduce_scatter_tokens as reduce_scatter_tokens

# Layers
from .linear import ColumnParallelLinear as ColumnParallelLinear
from .linear import RowParallelLinear as RowParallelLinear
from .linear import fused_column_linear as fused_column_linear
from .swiglu import SwiGLU as SwiGLU
from .gqa import causal_attention as causal_attention
from .rope import rope_cos_sin as rope_cos_sin
from .rope import apply_rope as apply_rope
from .rope_scaling import RopeScaling as RopeScaling
from .rope_scaling import YarnScaling as YarnScaling
from .gqa import GroupedQueryAttention as GroupedQueryAttention
from .gqa import kv_replicas as kv_replicas
from .latent_attention import LatentAttention as LatentAttention
from .latent_sizes import LatentSizes as LatentSizes
from .rms_norm import RMSNorm as RMSNorm
from .embedding import VocabParallelEmbedding as VocabParallelEmbedding
from .lm_head import LMHead as LMHead
from .cross_entropy import cross_entropy as cross_entropy
from .chunked_cross_entropy import chunked_cross_entropy as chunked_cross_entropy

# From one full state dict to the ranks' shards, and back
from .shard import Shard as Shard
from .shard import shards_of as shards_of
from .shard import load_full_state_dict as load_full_state_dict
from .shard import full_state_dict as full_state_dict
from .shard import initialize_parameters as initialize_parameters

# Gradients of replicated weights, and the norm of all
from .grads import sum_partial_gradients as sum_partial_gradients

# Bytes that it sends, numbers that it holds
from .closed_forms import sum_bytes as sum_bytes
from .closed_forms import layer_bytes as layer_bytes
from .closed_forms import norm_bytes as norm_bytes
from .closed_forms import kv_bytes as kv_bytes
from .closed_forms import cross_entropy_bytes as cross_entropy_bytes
from .closed_forms import gather_ratio as gather_ratio
from .closed_forms import layer_parameters as layer_parameters
from .closed_forms import layer_kept_numbers as layer_kept_numbers
