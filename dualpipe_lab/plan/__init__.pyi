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
from .model_of import known_models as known_models
from .model_of import KnownModel as KnownModel
from .model_of import num_parameters as num_parameters

# The memory of every rank
from .memory import memory as memory
from .memory import Memory as Memory
from .memory import RankMemory as RankMemory
from .states import model_states as model_states
from .states import ModelStates as ModelStates

# The seconds of a step
from .hardware import Hardware as Hardware
from .hardware import H100 as H100
from .hardware import H800 as H800
from .hardware import Range as Range
from .hardware import compute_seconds as compute_seconds
from .hardware import collective_seconds as collective_seconds
from .hardware import exchange_seconds as exchange_seconds
from .hardware import message_seconds as message_seconds
from .estimate import estimate as estimate
from .estimate import Estimate as Estimate
from .flops import model_flops as model_flops

# The plans that fit
from .fits import fits as fits
from .fits import Fits as Fits
from .fits import Fit as Fit
