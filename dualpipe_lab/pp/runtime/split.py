"""The split backward: I walks the graph down to the input once, W finishes at the parameters what I has left there.

Chapter: book/pp/zero-bubble.  In: the graph of one stage on one microbatch, gradients of its outputs.  Out: gradients.

The graph of a stage has a trunk, the nodes that lie between its outputs and its inputs, and twigs: what leads from the
trunk to parameters and to nothing else, such as the transpose of a weight.  A trunk node with a twig is a fork.

  I   runs the trunk.  It leaves the twigs alone and keeps, for every fork, the gradients that came into it.
  W   starts at every fork with these gradients and runs its twigs: each product of the chain rule is made once.
  between the two, only the forks hold what their forward saved (of a linear layer: its input); the rest is freed.

  I + W    the matrix products of B, no more: 2 per linear layer
  early    twigs that W cannot do without doing the trunk again: a parameter that several forks share, the parameters of
           a custom `autograd.Function` (it computes all its gradients in one piece), those in a region that somebody
           else recomputes (`torch.utils.checkpoint`).  I computes their gradients, W accumulates them.
  in one piece   a graph with torch's reentrant checkpoint, which starts backwards of its own: I is B, W is nothing
A first stage has no input to walk down to.  Its trunk are the nodes from which more than one parameter is reached, so
it is split like all others.  Hooks of parameters run in W, once.  A hook of a tensor between two layers runs in I, and
once more in W if that tensor comes out of a fork; its effect counts once.
Elsewhere: torch `stage_backward_input` and `stage_backward_weight` (a first stage is not split, and a weight that is
used twice in one stage raises); DeepSeek's WeightGradStore (linear layers written for it).
Source: Qi et al. 2023 (arXiv 2401.10241), section 2.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from dualpipe_lab.dp.synchronizer import accumulation_hooks, synchronizers_of
from dualpipe_lab.pp.runtime.graph_split import Fork, make_plan
from dualpipe_lab.pp.runtime.saved_tensors import free


class SplitBackward:
    """The backward of one graph in two calls.

    Args:
        roots: where the backward starts: `torch.autograd.graph.get_gradient_edge` of each output.
        inputs: tensors whose gradients I returns; none for a first stage.
    """

    def __init__(self, roots: Sequence[GradientEdge], inputs: Sequence[Tensor]) -> None:
        self._roots, self._inputs = roots, inputs
        self._forks: list[Fork] = []
        self._early: list[tuple[Tensor, Tensor]] = []

    def input_grad(self, grads: Sequence[Tensor]) -> list[Tensor | None]:
        """I: return the gradient of every input (None where no output depends on it); keep what W needs."""
        plan = make_plan(self._roots, self._inputs)
        if plan.in_one_piece:
            torch.autograd.backward(self._roots, grads)
            return [x.grad for x in self._inputs]
        forks = [(fork, slot) for fork in plan.forks for slot in sorted(fork.slots)]
        wanted = [*self._inputs, *plan.early, *(GradientEdge(fork.node, slot) for fork, slot in forks)]
        found: Sequence[Tensor | None] = [None] * len(wanted)
        if wanted and self._roots:
            found = torch.autograd.grad(self._roots, wanted, grads, retain_graph=True, allow_unused=True)
        first, second = len(self._inputs), len(self._inputs) + len(plan.early)
        self._early = [(leaf, g) for leaf, g in zip(plan.early, found[first:second], strict=True) if g is not None]
        for (fork, slot), grad in zip(forks, found[second:], strict=True):
            if grad is not None:
                fork.grads[slot] = grad
        self._forks = [fork for fork in plan.forks if fork.grads]
        free(plan.spent)
        return list(found[:first])

    def weight_grad(self) -> None:
        """W: accumulate the gradients of all parameters in `.grad`.

        Whoever sums gradients over data ranks may want those of some parameters first (`Synchronizer.turn`).
        """
        forks = [(fork.leaves, False, partial(_run, fork)) for fork in self._forks]
        early = [([leaf], True, partial(_accumulate, leaf, grad)) for leaf, grad in self._early]
        for leaves, is_made, accumulate in sorted([*forks, *early], key=lambda part: _turn(part[0])):
            for leaf in leaves:
                for owner in synchronizers_of(leaf):
                    owner.before_weight_grad(leaf, is_made)
            accumulate()
        self._forks, self._early = [], []


def _turn(leaves: Sequence[Tensor]) -> int:
    return min((owner.turn(leaf) for leaf in leaves for owner in synchronizers_of(leaf)), default=0)


def _run(fork: Fork) -> None:
    """Run the twigs of a fork."""
    edges = [GradientEdge(fork.node, slot) for slot in fork.grads]
    # The engine calls the hooks of the fork's outputs again; what they made of the gradients is kept already.
    handle = fork.node.register_prehook(partial(_kept, fork.grads))
    torch.autograd.backward(edges, list(fork.grads.values()), inputs=fork.leaves)
    handle.remove()


def _kept(grads: dict[int, Tensor], incoming: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    return tuple(grads.get(slot) for slot in range(len(incoming)))


def _accumulate(leaf: Tensor, grad: Tensor) -> None:
    """Add to `.grad` what autograd has computed for a leaf, and call the hooks that wait for that."""
    with torch.no_grad():
        if leaf.grad is None:
            leaf.grad = grad.clone()  # two leaves may have been given one tensor
        else:
            leaf.grad += grad
    for hook in accumulation_hooks(leaf):
        hook(leaf)
