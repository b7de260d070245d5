"""The split backward: I computes the gradients of a stage's inputs, W the gradients of its weights.

Chapter: book/pp/zero-bubble.  In: the autograd graph of one stage and microbatch, gradients of its outputs.
Out: gradients.
The words are torch's.  The input path is the set of nodes that lie between the stage's outputs and its inputs.  An
intermediate is a node of the input path from which a weight branch leaves: nodes that lead to weights and to nothing
else, such as the transpose of a weight.  I runs the input path and keeps the gradients that came into each
intermediate; W starts with these and runs the weight branches.  Each product of the chain rule is computed once.
Elsewhere: torch `stage_backward_input` and `stage_backward_weight` (a first stage is not split, and a weight that is
used twice in one stage raises); DeepSeek's WeightGradStore (linear layers written for it).
Source: Qi et al. 2023 (arXiv 2401.10241), section 2.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dualpipe_lab._private import (
    accumulate_grad_node,
    post_accumulate_grad_hooks,
    reentrant_checkpoint_node,
    saved_tensors,
)
from dualpipe_lab.grad_ready import synchronizers_of
from dualpipe_lab.pp.runtime.recompute import SavedSlot

Node: TypeAlias = Any  # a node of the autograd graph; torch has no public type for it
NextNodes: TypeAlias = dict[Node, list[Node]]  # for each node, weights first: the nodes that its gradients go to
_SEVERAL = object()  # the owner of what more than one intermediate leads to
_ACCUMULATE_GRAD = accumulate_grad_node()
_REENTRANT = reentrant_checkpoint_node()


class SplitBackward:
    """The backward of one graph in two calls, `input_grad` (I) and `weight_grad` (W).

    Args:
        roots: where the backward starts: `torch.autograd.graph.get_gradient_edge` of each output.
        inputs: tensors whose gradients I returns; none for a first stage.
        has_hooks: whether activations may have hooks: I then computes all gradients, and W accumulates them.  False
            says that they have none, and splits the work: a hook would run twice, or not at all, without an error.
    """

    def __init__(self, roots: Sequence[GradientEdge], inputs: Sequence[Tensor], has_hooks: bool = True) -> None:
        self._roots, self._inputs, self._has_hooks = roots, inputs, has_hooks
        self._intermediates: list[Intermediate] = []
        self._early_grads: list[tuple[Tensor, Tensor]] = []  # weight, gradient

    def input_grad(self, grads: Sequence[Tensor]) -> list[Tensor | None]:
        """I: return the gradient of every input, None where no output depends on it; keep what W needs."""
        split = split_graph(self._roots, self._inputs, self._has_hooks)
        if split.needs_full_backward:
            torch.autograd.backward(self._roots, grads)
            return [x.grad for x in self._inputs]
        edges = [(one, output_nr) for one in split.intermediates for output_nr in sorted(one.output_nrs)]
        wanted = [
            *self._inputs,
            *split.early_weights,
            *(GradientEdge(intermediate.node, output_nr) for intermediate, output_nr in edges),
        ]
        found: Sequence[Tensor | None] = [None] * len(wanted)
        if wanted and self._roots:
            with _before_nodes([(one.node, partial(_record, one.grads)) for one in split.intermediates]):
                found = torch.autograd.grad(self._roots, wanted, grads, retain_graph=True, allow_unused=True)
        num_inputs, num_early = len(self._inputs), len(split.early_weights)
        input_grads, early_grads = found[:num_inputs], found[num_inputs : num_inputs + num_early]
        for (intermediate, output_nr), grad in zip(edges, found[num_inputs + num_early :], strict=True):
            if grad is not None:  # the engine takes it before the hooks of a node that runs, `_record` after them
                intermediate.grads.setdefault(output_nr, grad)
        self._early_grads = [
            (weight, grad) for weight, grad in zip(split.early_weights, early_grads, strict=True) if grad is not None
        ]
        self._intermediates = [one for one in split.intermediates if one.grads]
        # Until W, only the intermediates keep their saved tensors (a linear layer: its input).
        free_saved_tensors(split.nodes_without_weights)
        return list(input_grads)

    def weight_grad(self) -> None:
        """W: accumulate the gradients of all weights in `.grad`.

        Data parallelism may ask for the gradients of some weights first (`Synchronizer.weight_grad_order`).
        """
        computed = [(one.weights, False, partial(_run_weight_branches, one)) for one in self._intermediates]
        early = [([weight], True, partial(accumulate_grad, weight, grad)) for weight, grad in self._early_grads]
        for weights, is_made, accumulate in sorted([*computed, *early], key=lambda part: _turn(part[0])):
            for weight in weights:
                announce_weight_grad(weight, is_made)
            accumulate()
        self._intermediates, self._early_grads = [], []


def _turn(weights: Sequence[Tensor]) -> int:
    return min((owner.weight_grad_order(weight) for weight in weights for owner in synchronizers_of(weight)), default=0)


def _run_weight_branches(intermediate: "Intermediate") -> None:
    edges = [GradientEdge(intermediate.node, output_nr) for output_nr in intermediate.grads]
    # The engine calls the hooks of the node's outputs again: they get zeros, and the node gets what it got in I.
    nothing = [_zeros(grad) for grad in intermediate.grads.values()]
    with _before_nodes([(intermediate.node, partial(_replace, intermediate.grads))]):
        torch.autograd.backward(edges, nothing, inputs=intermediate.weights)


@contextmanager
def _before_nodes(hooks: Iterable[tuple[Node, Callable[[Sequence[Tensor | None]], Any]]]) -> Iterator[None]:
    """Call each hook with the gradients that come into its node, after all other hooks in front of the node."""
    handles = [node.register_prehook(hook) for node, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _record(grads: dict[int, Tensor], incoming: Sequence[Tensor | None]) -> None:
    grads |= {output_nr: grad for output_nr, grad in enumerate(incoming) if grad is not None}


def _replace(grads: dict[int, Tensor], incoming: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    return tuple(grads.get(output_nr) for output_nr in range(len(incoming)))


def _zeros(grad: Tensor) -> Tensor:
    return grad.new_zeros(()).expand_as(grad) if grad.layout is torch.strided else torch.zeros_like(grad)


def announce_weight_grad(weight: Tensor, is_made: bool) -> None:
    """Tell data parallelism that a W computes a weight's gradient now, or adds one that I has made (`is_made`)."""
    for owner in synchronizers_of(weight):
        owner.before_weight_grad(weight, is_made)


def accumulate_grad(weight: Tensor, grad: Tensor, is_new: bool = False) -> None:
    """Add a gradient that is computed already to `.grad`, and call the hooks that wait for that.

    Args:
        weight: a parameter.
        grad: its gradient; it becomes the type in which gradients of this weight accumulate.
        is_new: nothing else holds this tensor: it may become `.grad` itself.
    """
    with torch.no_grad():
        if weight.grad is None:
            # a copy: autograd may have given one tensor to two weights
            weight.grad = grad.to(weight.grad_dtype or grad.dtype, copy=not is_new)
        else:
            weight.grad += grad
    for hook in post_accumulate_grad_hooks(weight):
        hook(weight)


# Which part of the graph belongs to I, and which to W


@dataclass
class Intermediate:
    """A node from which the gradients of some weights branch off: on the input path, or a root outside of it.

    Attributes:
        output_nrs: the outputs of the node that are used; a gradient comes in for each.
        weights: the weights whose gradients W computes from here.
        grads: the gradients that came in, by output.
    """

    node: Node
    output_nrs: set[int] = field(default_factory=lambda: {0})
    weights: list[Tensor] = field(default_factory=list)
    grads: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class GraphSplit:
    """How the backward of a graph is divided between I and W.

    Attributes:
        intermediates: where W starts.
        early_weights: the weights whose gradients I computes and W accumulates.  W would have to run the input path
            again for them: several intermediates share the weight, or its node computes all gradients at once.
        nodes_without_weights: the nodes that W does not visit; I frees their saved tensors.
        needs_full_backward: whether the graph cannot be split, since a region of it starts a backward of its own.
    """

    intermediates: list[Intermediate]
    early_weights: list[Tensor]
    nodes_without_weights: list[Node]
    needs_full_backward: bool = False


def split_graph(roots: Sequence[GradientEdge], inputs: Sequence[Tensor], has_hooks: bool = False) -> GraphSplit:
    """Divide a graph between I and W; without inputs, as on the first stage.  Time: O(edges), in Python."""
    next_nodes, further_outputs = _walk(roots)
    # torch's reentrant checkpoint starts backwards of its own: I is B, W does nothing.
    if any(isinstance(node, _REENTRANT) for node in next_nodes):
        return GraphSplit([], [], [], needs_full_backward=True)
    if has_hooks:
        leaves = [node.variable for node in next_nodes if isinstance(node, _ACCUMULATE_GRAD)]
        return GraphSplit([], [leaf for leaf in leaves if leaf not in set(inputs)], list(next_nodes))
    # A first stage has no input that needs a gradient.  The nodes that lead to more than one weight are its input path,
    # so it is split like every other stage.
    input_path = _nodes_to_inputs(next_nodes, inputs) if inputs else _nodes_to_several_weights(next_nodes)
    intermediates, owner = _find_intermediates(roots, next_nodes, input_path)
    early_weights = _assign_weights(next_nodes, input_path, intermediates, owner)
    used = [one for one in intermediates.values() if one.weights]
    for one in used:
        one.output_nrs.update(further_outputs.get(one.node, ()))
    visited = {one.node for one in used}
    unvisited = [node for node in next_nodes if node not in visited and owner.get(node) not in visited]
    return GraphSplit(used, early_weights, unvisited)


def _walk(roots: Sequence[GradientEdge]) -> tuple[NextNodes, dict[Node, set[int]]]:
    """Return every node after those it leads to, and which outputs are used of nodes that have several."""
    next_nodes: NextNodes = {}
    found: NextNodes = {}
    further_outputs: dict[Node, set[int]] = {}
    stack = []
    for node, output_nr, *_ in roots:
        stack.append(node)
        further_outputs.setdefault(node, set()).add(output_nr)
    while stack:
        node = stack[-1]
        if node in found:
            next_nodes.setdefault(stack.pop(), found[node])
            continue
        found[node] = following = []
        for child, output_nr in node.next_functions:
            if child is not None:
                following.append(child)
                if output_nr:
                    further_outputs.setdefault(child, set()).add(output_nr)
                if child not in found:
                    stack.append(child)
    return next_nodes, further_outputs


def _nodes_to_inputs(next_nodes: NextNodes, inputs: Sequence[Tensor]) -> set[Node]:
    """Return the nodes from which an input is reached."""
    path = {get_gradient_edge(x).node for x in inputs}
    for node, following in next_nodes.items():
        if not path.isdisjoint(following):
            path.add(node)
    return path


def _nodes_to_several_weights(next_nodes: NextNodes) -> set[Node]:
    """Return the nodes from which more than one weight is reached."""
    reached: dict[Node, Any] = {}  # the one weight that is reached, _SEVERAL, or None
    for node, following in next_nodes.items():
        weights = {reached[child] for child in following} - {None}
        if isinstance(node, _ACCUMULATE_GRAD):
            reached[node] = node
        elif len(weights) == 1:
            reached[node] = weights.pop()
        else:
            reached[node] = _SEVERAL if weights else None
    return {node for node, weight in reached.items() if weight is _SEVERAL}


def _find_intermediates(
    roots: Sequence[GradientEdge], next_nodes: NextNodes, input_path: set[Node]
) -> tuple[dict[Node, Intermediate], dict[Node, Any]]:
    """Return the intermediates, and for every node of a weight branch its intermediate's node, or _SEVERAL."""
    intermediates: dict[Node, Intermediate] = {}
    owner: dict[Node, Any] = {}

    def assign(node: Node, new_owner: Any) -> None:
        if owner.setdefault(node, new_owner) is not new_owner:
            owner[node] = _SEVERAL

    for edge in roots:
        if edge.node not in input_path:  # an output that depends on weights alone
            intermediates[edge.node] = Intermediate(edge.node)
            assign(edge.node, edge.node)
    for node in reversed(next_nodes):
        source = node if node in input_path else owner[node]
        for child in next_nodes[node]:
            if child not in input_path:
                if source is node:
                    intermediates.setdefault(node, Intermediate(node))
                assign(child, source)
    return intermediates, owner


def _assign_weights(
    next_nodes: NextNodes, input_path: set[Node], intermediates: dict[Node, Intermediate], owner: dict[Node, Any]
) -> list[Tensor]:
    """Give each weight to its intermediate; return the weights whose gradients I has to compute."""
    early_weights: list[Tensor] = []
    inseparable = {node for node in intermediates if node in input_path and _computes_all_at_once(node)}
    for node in next_nodes:
        if isinstance(node, _ACCUMULATE_GRAD) and node not in input_path:
            source = owner[node]
            if source is _SEVERAL or source in inseparable:
                early_weights.append(node.variable)
            else:
                intermediates[source].weights.append(node.variable)
    return early_weights


def _computes_all_at_once(node: Node) -> bool:
    """Return whether visiting a node twice repeats work: a custom Function, or one that foreign hooks recompute."""
    return isinstance(node, BackwardCFunction) or has_foreign_saved_tensors(node)


# Saved tensors: memory that nodes release before their graph dies


def free_saved_tensors(nodes: Iterable[Node]) -> None:
    """Drop the saved tensors of nodes that will not run again, in a graph that stays alive."""
    for node in nodes:
        for saved in saved_tensors(node):
            if saved.unpack_hook is None:
                saved.register_hooks(_drop, _refuse)
            elif isinstance(saved.data, SavedSlot):
                saved.data.drop()


def has_foreign_saved_tensors(node: Node) -> bool:
    """Return whether foreign hooks hold a saved tensor: unpacking may then cost a forward or a disk access."""
    return any(saved.unpack_hook is not None and not isinstance(saved.data, SavedSlot) for saved in saved_tensors(node))


def _drop(tensor: object) -> None:
    return None


def _refuse(nothing: object) -> None:
    raise RuntimeError("I has freed this activation, and W does not need it: does something else walk the graph?")
