# Orders of the operations of one forward and one backward
from .operations import Op as Op
from .operations import parse_ops as parse_ops
from .operations import ticks_of as ticks_of
from .order import Order as Order
from .order import InvalidOrder as InvalidOrder
from .order import check_pair as check_pair
from .builders import one_f_one_b_basic as one_f_one_b_basic
from .builders import one_f_one_b_overlap as one_f_one_b_overlap
from .builders import forward_alone as forward_alone
from .builders import backward_alone as backward_alone
from .builders import input_grads_alone as input_grads_alone
from .builders import weight_grads_alone as weight_grads_alone

# Their time on two streams
from .simulator import simulate as simulate
from .simulator import Streams as Streams
from .simulator import bound as bound
from .simulator import sums as sums
from . import closed_forms as closed_forms
from .host import Call as Call
from .host import host_calls as host_calls

# Their execution on real ranks
from .executor import Passage as Passage
from .executor import execute as execute
from .layer import CutLayer as CutLayer
from .stage import CutStage as CutStage
from .stage import overlapped_forward_backward as overlapped_forward_backward
from . import emulated as emulated
