"""The pipeline runtime: executes any program with real tensors on real ranks.

Chapter: book/pp/gpipe.  In: a program, the modules of this rank's stages, a loss.  Out: losses; gradients in `.grad`.
"""

from dualpipe_lab.pp.runtime.runtime import PipelineRuntime, StepResult

__all__ = ["PipelineRuntime", "StepResult"]
