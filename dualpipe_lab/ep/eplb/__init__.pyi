# Placements from loads
from .placement import ExpertPlacement as ExpertPlacement
from .placement import rebalance_experts as rebalance_experts
from .placement import rank_loads as rank_loads
from .placement import balance as balance

# The best possible placement
from .bounds import lower_bound as lower_bound
from .bounds import optimum as optimum
