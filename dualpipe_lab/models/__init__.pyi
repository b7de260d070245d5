# Llama
from .llama_config import LlamaConfig as LlamaConfig
from .plain_llama import PlainLlama as PlainLlama
from .plain_llama import PlainAttention as PlainAttention
from .plain_llama import parallelize as parallelize
from .plain_llama import plain_rope as plain_rope
from .llama import Llama as Llama
from .llama import LlamaLayer as LlamaLayer

# DeepSeek-V3's mixture of experts
from .v3_moe_config import V3MoEConfig as V3MoEConfig
from .plain_v3_moe import PlainV3MoE as PlainV3MoE
from .v3_moe import V3MoE as V3MoE

# A second token
from .mtp import MTPStage as MTPStage
from .mtp import next_tokens as next_tokens
from .plain_v3_moe import PlainMTP as PlainMTP

# CLIP: two towers that meet
from .clip import ClipConfig as ClipConfig
from .clip import clip_layers as clip_layers
from .clip import clip_stages as clip_stages
from .clip import clip_loss as clip_loss
from .contrastive import contrastive_loss as contrastive_loss

# Weights from elsewhere
from .pretrained.config import config_from_pretrained as config_from_pretrained
from .pretrained.load import load_pretrained as load_pretrained
from .pretrained.save import save_pretrained as save_pretrained
from .pretrained.slices import slices_of as slices_of
from .pretrained.folder import PretrainedFolder as PretrainedFolder
from .pretrained.config import PretrainedError as PretrainedError

# A model's stages for any pipeline
from .rank_model import build_stages as build_stages
from .rank_model import RankModel as RankModel
from .stage_rules import stage_layers as stage_layers
from .stage_rules import check_stages as check_stages

# Low-rank adapters beside frozen weights
from .lora import add_lora as add_lora
from .lora import merge_lora as merge_lora
