# A program: one list of actions per rank
from .program import Program as Program
from .program import Action as Action
from .program import Overlap as Overlap
from .lowering import lower as lower
from .validation.validator import validate as validate
from .validation.validator import InvalidProgram as InvalidProgram
from .torch_csv import to_torch_csv as to_torch_csv
from .torch_csv import from_torch_csv as from_torch_csv

# Schedules by name, and their closed forms
from . import schedules as schedules
from . import closed_forms as closed_forms
from .schedules.variants import Variant as Variant
from .schedules.variants import variant as variant

# What a program costs
from .cost import Cost as Cost
from .cost import UNIT_COST as UNIT_COST
from .simulator import simulate as simulate
from .explain import explain as explain
from .ranking import score as score
from .ranking import Score as Score
from .ranking import ranked as ranked
from .ranking import local_bubble as local_bubble
from .repeat import repeat as repeat
from .repeat import simulate_steps as simulate_steps
from .repeat import step_time as step_time
from .schedules.pipedream import updates_before as updates_before
from .schedules.pipedream import vertical_sync as vertical_sync
from .schedules.pipedream import double_buffered as double_buffered
from .schedules.pipedream import versions_kept as versions_kept
from .partition import partition as partition
from .optimise import optimise as optimise
from .optimise import search as search
from .optimise import lower_bound as lower_bound

# Programs on real ranks
from .runtime import PipelineRuntime as PipelineRuntime
from .runtime import Stage as Stage
from .runtime import WithLoss as WithLoss
from .runtime import ReadyAction as ReadyAction
from .runtime import recompute as recompute
from .runtime import recompute_layers as recompute_layers
from .runtime import check as check
from .runtime import greedy as greedy
from .runtime import AsynchronousRuntime as AsynchronousRuntime
from .runtime.split_backward import SplitBackward as SplitBackward
from .runtime.stage import ForwardResult as ForwardResult
from .runtime.stage import run_pair_serially as run_pair_serially
from .runtime import run_pair_by_module as run_pair_by_module
from .runtime import ModuleStage as ModuleStage
from .runtime import example as example
