# One object that says how a model is trained on its ranks
from .plan import Plan as Plan
from .fields import PRECISIONS as PRECISIONS
