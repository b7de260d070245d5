"""Which part of a stage's graph belongs to I, and which to W: trunk, forks and twigs (see `split`).

In: the roots and inputs of an autograd graph.  Out: a `Plan`.  Time: O(edges), in Python, once per I.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dualpipe_lab._private import accumulate_grad_node, reentrant_checkpoint_node
from dualpipe_lab.pp.runtime.saved_tensors import held_by_others

Node: TypeAlias = Any  # a node of the autograd graph; torch has no public type for it
Children: TypeAlias = dict[Node, list[Node]]  # for each node, leaves first: the nodes that its gradients go to
_MANY = object()  # the owner of what more than one fork leads to
_LEAF = accumulate_grad_node()
_REENTRANT = reentrant_checkpoint_node()


@dataclass
class Fork:
    """A node of the trunk, or a root of a twig, where the gradients of some parameters branch off.

    Attributes:
        slots: its outputs; a gradient comes in for each that is used.
        leaves: the parameters that W computes from here.
        grads: what came in, by slot.
    """

    node: Node
    slots: set[int] = field(default_factory=lambda: {0})
    leaves: list[Tensor] = field(default_factory=list)
    grads: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class Plan:
    """How the backward of a graph is split.

    Attributes:
        forks: where W starts.
        early: the parameters whose gradients I computes.
        spent: the nodes that W does not visit.
        in_one_piece: whether the graph cannot be split: it holds a region that starts a backward of its own.
    """

    forks: list[Fork]
    early: list[Tensor]
    spent: list[Node]
    in_one_piece: bool = False


def make_plan(roots: Sequence[GradientEdge], inputs: Sequence[Tensor]) -> Plan:
    """Divide a graph between I and W; without inputs, as the first stage is."""
    children, further = _from_leaves_up(roots)
    if any(isinstance(node, _REENTRANT) for node in children):
        return Plan([], [], [], in_one_piece=True)
    trunk = _towards(children, inputs) if inputs else _towards_many(children)
    forks, owner = _owners(roots, children, trunk)
    early = _share_out(children, trunk, forks, owner)
    used = [fork for fork in forks.values() if fork.leaves]
    for fork in used:
        fork.slots.update(further.get(fork.node, ()))
    busy = {fork.node for fork in used}
    spent = [node for node in children if node not in busy and owner.get(node) not in busy]
    return Plan(used, early, spent)


def _from_leaves_up(roots: Sequence[GradientEdge]) -> tuple[Children, dict[Node, set[int]]]:
    """Every node of the graph, each after those it leads to; and the outputs in use of nodes that have several."""
    children: Children = {}
    found: Children = {}
    further: dict[Node, set[int]] = {}
    stack = []
    for node, slot, *_ in roots:
        stack.append(node)
        further.setdefault(node, set()).add(slot)
    while stack:
        node = stack[-1]
        if node in found:
            children.setdefault(stack.pop(), found[node])
            continue
        found[node] = below = []
        for child, slot in node.next_functions:
            if child is not None:
                below.append(child)
                if slot:
                    further.setdefault(child, set()).add(slot)
                if child not in found:
                    stack.append(child)
    return children, further


def _towards(children: Children, inputs: Sequence[Tensor]) -> set[Node]:
    """The nodes from which an input is reached."""
    trunk = {get_gradient_edge(x).node for x in inputs}
    for node, below in children.items():
        if not trunk.isdisjoint(below):
            trunk.add(node)
    return trunk


def _towards_many(children: Children) -> set[Node]:
    """The nodes from which more than one parameter is reached."""
    reached: dict[Node, Any] = {}
    for node, below in children.items():
        leaves = {reached[child] for child in below} - {None}
        alone = leaves.pop() if len(leaves) == 1 else _MANY if leaves else None
        reached[node] = node if isinstance(node, _LEAF) else alone
    return {node for node, leaf in reached.items() if leaf is _MANY}


def _owners(
    roots: Sequence[GradientEdge], children: Children, trunk: set[Node]
) -> tuple[dict[Node, Fork], dict[Node, Any]]:
    """The forks, and for every node of a twig the node of its fork, or _MANY."""
    forks: dict[Node, Fork] = {}
    owner: dict[Node, Any] = {}

    def own(node: Node, fork: Any) -> None:
        if owner.setdefault(node, fork) is not fork:
            owner[node] = _MANY

    for edge in roots:
        if edge.node not in trunk:  # an output that depends on parameters alone
            forks[edge.node] = Fork(edge.node)
            own(edge.node, edge.node)
    for node in reversed(children):
        of = node if node in trunk else owner[node]
        for child in children[node]:
            if child not in trunk:
                if of is node:
                    forks.setdefault(node, Fork(node))
                own(child, of)
    return forks, owner


def _share_out(children: Children, trunk: set[Node], forks: dict[Node, Fork], owner: dict[Node, Any]) -> list[Tensor]:
    """Give each parameter to its fork; return those that are better computed early."""
    early: list[Tensor] = []
    in_one_piece = {node for node in forks if node in trunk and _computes_all_at_once(node)}
    for node in children:
        if isinstance(node, _LEAF) and node not in trunk:
            fork = owner[node]
            (early if fork is _MANY or fork in in_one_piece else forks[fork].leaves).append(node.variable)
    return early


def _computes_all_at_once(node: Node) -> bool:
    """Whether a second visit would repeat work: a custom Function, or a region that somebody else recomputes."""
    return isinstance(node, BackwardCFunction) or held_by_others(node)
