# One object that says how a model is trained on its ranks
from .plan import Plan as Plan
from .fields import PRECISIONS as PRECISIONS

# Published models
from .model_of import model_of as model_of
from .model_of import known_models as known_models

# The memory of every rank
from .memory import memory as memory
from .memory import Memory as Memory

# The seconds of a step
from .hardware import Hardware as Hardware
from .hardware import H100 as H100
from .hardware import H800 as H800
from .hardware import collective_seconds as collective_seconds
from .hardware import message_seconds as message_seconds
from .estimate import estimate as estimate

# The plans that fit
from .fits import fits as fits
