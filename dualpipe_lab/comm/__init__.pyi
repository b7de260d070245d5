# Groups of ranks
from .groups import new_group as new_group
from .groups import get_rank as get_rank
from .groups import get_world_size as get_world_size

# Collectives that copy or reduce
from .collectives import all_reduce as all_reduce
from .collectives import reduce as reduce
from .collectives import broadcast as broadcast
from .collectives import all_gather_single as all_gather_single
from .collectives import all_gather as all_gather
from .collectives import barrier as barrier
from .collectives import reduce_scatter_single as reduce_scatter_single

# Collectives that distribute
from .distribute import all_to_all_single as all_to_all_single
from .distribute import gather as gather
from .distribute import scatter as scatter
from .distribute import all_gather_object as all_gather_object

# Messages between two ranks
from .peers import send as send
from .peers import recv as recv
from .peers import isend as isend
from .peers import irecv as irecv
from .peers import batch_isend_irecv as batch_isend_irecv
from .peers import P2P as P2P
from .call import Work as Work
from .call import Pending as Pending

# Bytes sent and received, derived from the algorithms
from dualpipe_lab.launch.record import traffic as traffic
