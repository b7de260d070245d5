# Sums around a ring
from .ring import ring_all_reduce as ring_all_reduce
from .ring import Ring as Ring
from .ring import ring_reduce_scatter as ring_reduce_scatter
from .ring import ring_all_gather as ring_all_gather

# Softmax, block by block
from .softmax import Softmax as Softmax
from .softmax import softmax as softmax
from .softmax import softmax_backward as softmax_backward
from .online_softmax import SoftmaxStats as SoftmaxStats
from .online_softmax import online_softmax as online_softmax
from .online_softmax import online_average as online_average
from .ring_softmax import ring_softmax as ring_softmax
from .ring_softmax import all_reduce_softmax as all_reduce_softmax
from .ring_softmax import ring_softmax_stats as ring_softmax_stats

# Attention tile by tile
from .flash_attention import flash_attention as flash_attention
from .flash_attention import FlashTiles as FlashTiles
from .flash_attention import Kernel as Kernel

# A sequence on several ranks
from .layouts import SequenceLayout as SequenceLayout
from .layouts import LAYOUTS as LAYOUTS
from .layouts import make_layout as make_layout
from .layouts import visible_pairs as visible_pairs
from .layouts import critical_path as critical_path
from .sequence import positions as positions
from .sequence import shard_sequence as shard_sequence
from .sequence import unshard_sequence as unshard_sequence
from .sequence import next_token_labels as next_token_labels
from .ring_attention import ring_attention as ring_attention
from .all_gather_attention import all_gather_attention as all_gather_attention
from .latent_ring import LatentRing as LatentRing

# Bytes and time
from .closed_forms import AttentionSizes as AttentionSizes
from .closed_forms import sent_bytes as sent_bytes
from .closed_forms import latent_sent_bytes as latent_sent_bytes
from .closed_forms import unfolding_flops as unfolding_flops
from .closed_forms import saved_bytes as saved_bytes
from .layouts import MessageTimes as MessageTimes
from .layouts import ring_forward_ns as ring_forward_ns
from .layouts import ring_backward_ns as ring_backward_ns
