# One object that says how a model is trained on its ranks
from .plan import Plan as Plan
from .fields import PRECISIONS as PRECISIONS

# Who sums what with whom
from .sums import SumsTable as SumsTable
from .sums import ParameterSums as ParameterSums
from .sums import Sum as Sum

# Messages and bytes of a step
from .traffic import StepTraffic as StepTraffic

# Published models
from .model_of import model_of as model_of
from .model_of import num_parameters as num_parameters
from .known_models import KNOWN_MODELS as KNOWN_MODELS
from .known_models import KnownModel as KnownModel

# The hardware
from .cluster import Cluster as Cluster
from .hardware import Accelerator as Accelerator
from .hardware import LinkClass as LinkClass
from .efficiency import Efficiency as Efficiency
from .accelerators import CLUSTERS as CLUSTERS

# The memory of every rank
from .estimate import estimate as estimate
from .estimate import Estimate as Estimate
from .memory import RankMemory as RankMemory
from .memory import Peak as Peak
from .memory import Figure as Figure
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

# The seconds of a step
from .step_time import step_time as step_time
from .step_time import StepTime as StepTime
from .step_time import StepTimer as StepTimer
from .time_rules import TimeRules as TimeRules
from .time_rules import LAB_TIME as LAB_TIME
from .time_rules import MEGATRON_TIME as MEGATRON_TIME
from .products import model_flops as model_flops

# The best of all plans
from .planner import search as search
from .search_result import SearchResult as SearchResult
from .search_result import Choice as Choice
from .search_result import Lost as Lost

# A plan in the settings of other frameworks
from . import exports as exports
from .kept_latent import LatentTable as LatentTable
from .kept_experts import ExpertTable as ExpertTable
