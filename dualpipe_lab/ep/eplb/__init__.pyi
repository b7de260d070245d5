# Plans from loads
from .plan import Plan as Plan
from .plan import rebalance_experts as rebalance_experts
from .plan import rank_loads as rank_loads
from .balanced import balance as balance
from .sticky import rebalance_sticky as rebalance_sticky
from .sticky import num_moves as num_moves

# How good a plan can be
from .bounds import lower_bound as lower_bound
from .bounds import optimum as optimum
