# One object that says how a model is trained on its ranks
from .plan import Plan as Plan
from .fields import PRECISIONS as PRECISIONS

# Who sums what with whom
from .sums import SumsTable as SumsTable
from .sums import ParameterSums as ParameterSums
from .sums import Sum as Sum

# Messages and bytes of a step
from .traffic import StepTraffic as StepTraffic
