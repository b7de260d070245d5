__version__: str

# A function on ranks
from .launch.launcher import launch as launch
from .launch.supervise.errors import RankError as RankError
from .launch.supervise.errors import RankTimeout as RankTimeout
from .launch.server import start_fork_server as start_fork_server
from .launch.server import restart_fork_server as restart_fork_server
from .launch.cluster.environment import cluster as cluster
from .launch.cluster.emulated_hosts import emulated_hosts as emulated_hosts
from .launch.accelerator import nccl_ready as nccl_ready
from .launch.compare import compare_backends as compare_backends
from .launch.one_process import same_as_one_process as same_as_one_process

# Inside a rank: messages, time, places
from . import comm as comm
from .launch.context import device as device
from .launch.context import compute as compute
from .launch.context import now as now
from .launch.context import span as span
from .launch.context import rank_context as rank_context
from .launch.mesh import Mesh as Mesh
from .topology import Topology as Topology
from .launch.emulator import Link as Link
from .launch.emulator import NodeLink as NodeLink

# Long runs: the traces of some steps in files, and one timeline of them
from .launch.record.step_traces import StepTraces as StepTraces
from .launch.record.step_traces import read_traces as read_traces

# Pipelines as data
from .pp.program import Action as Action
from .pp.program import Overlap as Overlap
from .pp.program import Program as Program
from .pp import schedules as schedules
from .pp.lowering import lower as lower
from .pp.validation.validator import validate as validate
from .pp.validation.rules import InvalidProgram as InvalidProgram
from .pp.cost import Cost as Cost
from .pp.simulator import simulate as simulate
from .pp.explain import explain as explain
from .pp.runtime import PipelineRuntime as PipelineRuntime

# One model, every cut
from .plan import Plan as Plan
from . import plan as plan
from . import train as train

# Timelines
from .timeline import Timeline as Timeline
from .timeline import Span as Span
from .timeline import Message as Message

# The parts
from . import dp as dp
from . import tp as tp
from . import pp as pp
from . import cp as cp
from . import ep as ep
from . import models as models
from . import viz as viz
from . import data as data
