# Rows for other ranks
from .all_to_all import Splits as Splits
from .all_to_all import exchange_counts as exchange_counts
from .all_to_all import exchange_splits as exchange_splits
from .all_to_all import all_to_all_rows_async as all_to_all_rows_async
from .all_to_all import dispatch as dispatch
from .all_to_all import combine as combine
from .all_to_all import dispatch_async as dispatch_async
from .all_to_all import combine_async as combine_async

# Which experts a token uses
from .router import TopKRouter as TopKRouter
from .router import Routing as Routing
from .router import top_experts as top_experts
from .router import expert_weights as expert_weights
from .router import tokens_per_expert as tokens_per_expert
from .router_losses import balance_loss as balance_loss
from .router_losses import z_loss as z_loss
from .router_losses import sum_over_ranks as sum_over_ranks
from .router_losses import sequence_loss as sequence_loss

# Experts on several ranks
from .moe import ExpertParallel as ExpertParallel
from .moe.permutation import plan_routes as plan_routes
from .moe.operators import permute as permute
from .moe.operators import unpermute as unpermute
from .moe.operators import sort_by_expert as sort_by_expert
from .moe.operators import unsort_by_expert as unsort_by_expert
from .moe.experts import grouped_product as grouped_product
from .moe import Experts as Experts
from .moe import MoE as MoE
from .moe import expert_parameters as expert_parameters
from .moe import reduce_gradients as reduce_gradients
from .moe import operators as operators

# A fixed number of slots per expert
from .gshard import capacity as capacity
from .gshard import DROPPED as DROPPED
from .gshard import exchange_bytes as exchange_bytes
from .gshard import queue_positions as queue_positions
from .gshard import find_slots as find_slots
from .gshard import GShardMoE as GShardMoE

# DeepSeek-V3's layer
from .deepseek_moe import DeepSeekRouter as DeepSeekRouter
from .deepseek_moe import DeepSeekMoE as DeepSeekMoE
from .deepseek_moe import group_limited_topk as group_limited_topk
from .deepseek_moe import update_biases as update_biases
from .deepseek_moe import bias_step as bias_step
from .node_dispatch import NodeGroups as NodeGroups
from .node_dispatch import hierarchical_experts as hierarchical_experts

# Namespaces: experts placed by their load, and layers that hide their messages
from . import eplb as eplb
from . import overlap as overlap
