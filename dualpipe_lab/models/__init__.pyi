# Llama
from .llama_config import LlamaConfig as LlamaConfig
from .plain_llama import PlainLlama as PlainLlama
from .plain_llama import PlainAttention as PlainAttention
from .plain_llama import parallelize as parallelize
from .plain_llama import plain_rotate as plain_rotate
from .llama import Llama as Llama
from .llama import LlamaLayer as LlamaLayer

# DeepSeek-V3's mixture of experts
from .v3_moe_config import V3MoEConfig as V3MoEConfig
from .plain_v3_moe import PlainV3MoE as PlainV3MoE
from .v3_moe import V3MoE as V3MoE

# A model's stages for any pipeline
from .rank_model import build_stages as build_stages
from .rank_model import RankModel as RankModel
from .stage_rules import stage_layers as stage_layers
from .stage_rules import check_stages as check_stages
