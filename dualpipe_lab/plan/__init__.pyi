# One object that says how a model is trained on its ranks
from .plan import Plan as Plan
from .fields import PRECISIONS as PRECISIONS

# Who sums what with whom
from .sums import SumsTable as SumsTable
from .sums import ParameterSums as ParameterSums
from .sums import Sum as Sum

# Messages and bytes of a step
from .traffic import StepTraffic as StepTraffic

# The hardware
from .cluster import Cluster as Cluster
from .cluster import Accelerator as Accelerator
from .cluster import LinkClass as LinkClass
from .cluster import Efficiency as Efficiency
from .cluster import CLUSTERS as CLUSTERS

# The memory of every rank
from .estimate import estimate as estimate
from .estimate import Estimate as Estimate
from .rank_memory import RankMemory as RankMemory
from .rank_memory import Peak as Peak
from .rank_memory import Figure as Figure
from .states import model_states as model_states
from .states import ModelStates as ModelStates
from .states import NumberBytes as NumberBytes
from .gpt_config import GptConfig as GptConfig

# What is kept for the backward, tensor by tensor
from .kept_tensors import LayerTable as LayerTable
from .kept_tensors import KeptTensor as KeptTensor
from .kept_tensors import KeepRules as KeepRules
from .kept_tensors import LAB as LAB
from .kept_tensors import MEGATRON as MEGATRON
from .kept_tensors import MEGATRON_DROPOUT as MEGATRON_DROPOUT
from .kept_tensors import KORTHIKANTI as KORTHIKANTI
from .kept_tensors import KORTHIKANTI_SELECTIVE as KORTHIKANTI_SELECTIVE
from .kept_latent import LatentTable as LatentTable
from .kept_experts import ExpertTable as ExpertTable
