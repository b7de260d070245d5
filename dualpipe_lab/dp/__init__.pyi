# Equal weights, a shard of the batch on each rank, one sum of gradients
from .data_parallel import broadcast_module as broadcast_module
from .data_parallel import token_loss as token_loss
from .data_parallel import num_valid_tokens as num_valid_tokens
from .data_parallel import all_reduce_gradients as all_reduce_gradients
from .data_parallel import IGNORE_INDEX as IGNORE_INDEX

# Gradients summed while the backward still runs
from .ddp import GradientReducer as GradientReducer
from .ddp import DDP as DDP

# Adam, full and on a shard
from .adam import adamw_ as adamw_
from .adam import AdamW as AdamW
from .adam import OptimizerShard as OptimizerShard
from .adam import stochastic_round as stochastic_round
from .grad_norm import global_norm as global_norm
from .grad_norm import clip_factor as clip_factor
from .mixed_precision import LossScaler as LossScaler

# What a model declares: copies and shards of each parameter
from .param_specs import param_specs as param_specs
from .param_specs import ModelSpec as ModelSpec

# ZeRO: sharded optimizer state, gradients, weights
from .layout import Layout as Layout
from .layout import reshard as reshard
from dualpipe_lab.sharding import shard_slice as shard_slice
from .sharded import ShardUpdater as ShardUpdater
from .zero1 import Zero1 as Zero1
from .zero2 import Zero2 as Zero2
from .zero3 import Zero3 as Zero3
from .flat_parameter import FlatParameter as FlatParameter
from .sharded import full_weights as full_weights
from .sharded import full_gradients as full_gradients
from .ema import ShardedEMA as ShardedEMA

# Shards inside a node, replicas across nodes
from .hybrid import count_by_node as count_by_node
from .hybrid import NodeBytes as NodeBytes
from .hybrid import hybrid_sent_bytes as hybrid_sent_bytes

# What it sends and holds
from .closed_forms import Precision as Precision
from .closed_forms import BF16 as BF16
from .closed_forms import BF16_FP32_GRADS as BF16_FP32_GRADS
from .closed_forms import FP32 as FP32
from .closed_forms import ZERO_STAGES as ZERO_STAGES
from .closed_forms import bytes_per_parameter as bytes_per_parameter
from .closed_forms import sent_bytes as sent_bytes
from .measure import storage_bytes as storage_bytes
from .measure import live_bytes as live_bytes
from .measure import live_tensors as live_tensors

# Gradients of a pipeline's stages
from dualpipe_lab.grad_ready import Synchronizer as Synchronizer

# On disk
from . import checkpoint as checkpoint
