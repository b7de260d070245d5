"""`PipelineComm`: the messages between stages, activations towards the loss and gradients back.

Chapter: book/pp/pp-basic.  In: results of actions.  Out: inputs of actions.
  `start_receive`    launches the receive of one result, `take` waits for it; a receive may be prefetched
  `keep`, `send`     a result is kept until its SEND; if both stages are on one rank, `take` finds it without a message
  buffers            allocated when the receive is launched; the action that takes a buffer owns it
  batches            the tensors of one result are launched in one call
Elsewhere: Megatron `p2p_communication`; d9d `PipelineCommunicationHandler`.
"""

import torch

from dualpipe_lab.comm import Pending
from dualpipe_lab.pp.program import SEND_F, Action, B, F, Program
from dualpipe_lab.pp.runtime.p2p import PipelineP2P
from dualpipe_lab.pp.runtime.rank_plan import made_by
from dualpipe_lab.pp.runtime.shape_inference import BoundaryShapes, gradients_of, spec_of
from dualpipe_lab.pp.runtime.stage import Tensors, with_names


class PipelineComm:
    """Receives the inputs and sends the results of one rank's actions.

    Attributes:
        peak_buffers: the most results of this step for which receive buffers were allocated at once.
    """

    def __init__(self, program: Program, p2p: PipelineP2P, shapes: BoundaryShapes) -> None:
        self._program, self._p2p, self._shapes = program, p2p, shapes
        self._receives: dict[Action, Pending[Tensors]] = {}  # by the F or B whose result it is
        self._results: dict[Action, tuple[str, Tensors]] = {}  # made on this rank, neither taken nor sent yet
        self.peak_buffers = 0

    def begin_step(self) -> None:
        """Forget the messages of the step before."""
        self._receives.clear()
        self._results.clear()
        self.peak_buffers = 0

    def start_receive(self, receive: Action, prefetch: bool = False) -> None:
        """Launch a receive unless it is launched already.

        A prefetched receive is left for later if its shape is not known yet; otherwise the shape is received first.
        """
        result = made_by(receive)
        if result in self._receives:
            return
        boundary = result.stage if result.kind == F else result.stage - 1  # the stage in front of it
        spec = self._shapes.known_spec(boundary, result.microbatch)
        if spec is None:
            if prefetch:
                return
            spec = self._shapes.receive_spec(boundary, result.microbatch)
        if result.kind == B:
            spec = gradients_of(spec)
        p2p = self._p2p
        source = self._program.rank_of(result.stage, result.microbatch)
        allocated = (torch.empty(shape, dtype=dtype, device=p2p.device) for shape, dtype, _ in spec)
        buffers = with_names(allocated, [name for *_, name in spec])
        tags = [p2p.result_tag(result, number) for number in range(len(buffers))]
        messages = [p2p.receive(buffer, source, tag) for buffer, tag in zip(buffers, tags, strict=True)]
        self._receives[result] = Pending(p2p.launch(messages), lambda: buffers)
        self.peak_buffers = max(self.peak_buffers, len(self._receives))

    def take(self, action: Action) -> Tensors:
        """Wait for the input of an action and return it.

        The input of F is the result of the previous stage, that of B and I the gradient from the next stage.
        """
        stage, kind, microbatch = action
        result = Action(stage - 1, F, microbatch) if kind == F else Action(stage + 1, B, microbatch)
        if result in self._results:
            _, tensors = self._results.pop(result)
            return tensors
        tensors = self._receives[result].wait()
        del self._receives[result]
        return tensors

    def keep(self, action: Action, tensors: Tensors) -> None:
        """Keep the result of F, or of B or I, until it is sent or taken."""
        stage, kind, microbatch = action
        self._results[Action(stage, F if kind == F else B, microbatch)] = str(action), tensors

    def send(self, message: Action) -> None:
        """Launch the sends of a result: those of an activation to the next stage, of a gradient to the previous one."""
        stage, kind, microbatch = message
        is_forward = kind == SEND_F
        result = Action(stage, F if is_forward else B, microbatch)
        label, tensors = self._results.pop(result)
        if is_forward:
            self._shapes.send_spec(stage, microbatch, spec_of(tensors))
        p2p = self._p2p
        target = self._program.rank_of(stage + 1 if is_forward else stage - 1, microbatch)
        messages = []
        for number, tensor in enumerate(tensors):
            name = f"{label} ({number})" if number else label
            messages.append(p2p.send(tensor.contiguous(), target, p2p.result_tag(result, number), name))
        p2p.launch(messages)
