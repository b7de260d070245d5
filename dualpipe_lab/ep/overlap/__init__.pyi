# Orders of the operations of one forward and one backward
from .order import Op as Op
from .order import parse_ops as parse_ops
from .order import ticks_of as ticks_of
from .order import Order as Order
from .order import InvalidOrder as InvalidOrder
from .order import check_pair as check_pair
from .order import one_f_one_b_basic as one_f_one_b_basic
from .order import one_f_one_b_overlap as one_f_one_b_overlap
from .order import forward_alone as forward_alone
from .order import backward_alone as backward_alone
from .order import input_grads_alone as input_grads_alone
from .order import weight_grads_alone as weight_grads_alone

# Their time on two streams
from .simulator import simulate as simulate
from .simulator import lower_bound as lower_bound
from . import closed_forms as closed_forms
from .simulator import host_calls as host_calls

# Their execution on real ranks
from .executor import OverlappableLayer as OverlappableLayer
from .executor import MicrobatchPass as MicrobatchPass
from .executor import execute as execute
from .stage import OverlappableStage as OverlappableStage
from .stage import overlappable_stage as overlappable_stage
from .stage import overlapped_forward_backward as overlapped_forward_backward
from . import emulated as emulated
