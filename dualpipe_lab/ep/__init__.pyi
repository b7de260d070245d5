# Rows for other ranks
from .all_to_all import Splits as Splits
from .all_to_all import exchange_counts as exchange_counts
from .all_to_all import agree as agree
from .all_to_all import start_rows as start_rows
from .all_to_all import dispatch as dispatch
from .all_to_all import combine as combine
from .all_to_all import start_dispatch as start_dispatch
from .all_to_all import start_combine as start_combine

# Which experts a token uses
from .router import TopKRouter as TopKRouter
from .router import Routing as Routing
from .router import top_experts as top_experts
from .router import expert_weights as expert_weights
from .router import tokens_per_expert as tokens_per_expert
from .router_losses import balance_loss as balance_loss
from .router_losses import z_loss as z_loss
from .router_losses import sum_over_ranks as sum_over_ranks
from .sequence_loss import sequence_loss as sequence_loss

# Experts on several ranks
from .moe import ExpertParallel as ExpertParallel
from .moe import plan_routes as plan_routes
from .moe import Routes as Routes
from .moe import permute as permute
from .moe import unpermute as unpermute
from .moe import regroup as regroup
from .moe import ungroup as ungroup
from .moe import weigh as weigh
from .moe import grouped_product as grouped_product
from .moe import Experts as Experts
from .moe import SMoE as SMoE
from .moe import expert_parameters as expert_parameters
from .moe import sum_gradients as sum_gradients
from .moe import counted_gradients as counted_gradients
from .moe import operators as operators

# A fixed number of slots per expert
from .capacity import capacity as capacity
from .capacity import DROPPED as DROPPED
from .capacity import exchange_bytes as exchange_bytes
from .capacity import queue_places as queue_places
from .capacity import find_slots as find_slots
from .capacity import fill_slots as fill_slots
from .capacity import read_slots as read_slots
from .gshard import GShardMoE as GShardMoE
from .gshard import GShardOutput as GShardOutput

# DeepSeek-V3's layer
from .deepseek_moe import DeepSeekRouter as DeepSeekRouter
from .deepseek_moe import DeepSeekMoE as DeepSeekMoE
from .deepseek_moe import choose_in_groups as choose_in_groups
from .deepseek_moe import update_biases as update_biases
from .deepseek_moe import bias_step as bias_step
from .node_dispatch import Nodes as Nodes
from .node_dispatch import through_nodes as through_nodes

# Namespaces: experts placed by their load, and layers that hide their messages
from . import eplb as eplb
from . import overlap as overlap
