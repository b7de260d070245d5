"""The pipeline runtime: executes any program with real tensors on real ranks.

Chapter: book/pp/gpipe.  In: a program, the modules of this rank's stages, a loss.  Out: losses; gradients in `.grad`.
"""

from dualpipe_lab.pp.runtime.asynchronous import AsynchronousRuntime
from dualpipe_lab.pp.runtime.batch import Evaluation, StepResult, split_batch
from dualpipe_lab.pp.runtime.check import check
from dualpipe_lab.pp.runtime.generate import greedy
from dualpipe_lab.pp.runtime.module_pairs import ModuleStage, run_pair_by_module
from dualpipe_lab.pp.runtime.recompute import recompute, recompute_layers
from dualpipe_lab.pp.runtime.runtime import PipelineRuntime
from dualpipe_lab.pp.runtime.stage import ReadyAction, Stage, WithLoss

__all__ = [
    "AsynchronousRuntime",
    "Evaluation",
    "ModuleStage",
    "PipelineRuntime",
    "ReadyAction",
    "Stage",
    "StepResult",
    "WithLoss",
    "check",
    "greedy",
    "recompute",
    "recompute_layers",
    "run_pair_by_module",
    "split_batch",
]
