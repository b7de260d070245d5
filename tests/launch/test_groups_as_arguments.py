"""What is no process group is refused with one sentence, before any message."""

import torch

import dualpipe_lab as lab
from dualpipe_lab import comm, cp, ep, tp
from dualpipe_lab.cp.layouts import make_layout
from dualpipe_lab.ep.all_to_all import Splits
from dualpipe_lab.tp import mappings


def refused(call):
    try:
        call()
    except TypeError as error:
        return str(error)
    return "nothing"


def test_options_in_the_place_of_a_group(subtests):
    def fn(rank, world_size):
        x, splits = torch.ones(2, 2, 2, requires_grad=True), Splits((1, 1), (1, 1))
        calls = {
            "all_reduce": lambda group: comm.all_reduce(x.detach(), group=group),
            "get_rank": comm.get_rank,
            "copy": lambda group: mappings.copy_to_ranks(x, group),
            "reduce": lambda group: mappings.reduce_from_ranks(x, group),
            "gather": lambda group: mappings.gather_from_ranks(x, group=group),
            "slice": lambda group: mappings.slice_to_ranks(x, group=group),
            "gather tokens": lambda group: mappings.gather_tokens(x, group),
            "scatter tokens": lambda group: mappings.reduce_scatter_tokens(x, group),
            "softmax": lambda group: cp.ring_softmax(x, group),
            "all-reduce softmax": lambda group: cp.all_reduce_softmax(x, group),
            "unshard": lambda group: cp.unshard_sequence(x, make_layout("contiguous", 4, 2), group=group),
            "ring": lambda group: cp.ring_all_reduce(x.detach(), group),
            "dispatch": lambda group: ep.dispatch(x, splits, group),
            "combine": lambda group: ep.combine(x, splits, group),
        }
        found = {
            (name, kind): refused(lambda call=call, group=group: call(group))
            for name, call in calls.items()
            for kind, group in {"TensorParallel": tp.TensorParallel(), "int": -1}.items()
        }
        ours = lab.Mesh(lab.Topology([("tp", 2)])).group("tp")
        for operator in (mappings.gather_from_ranks, mappings.slice_to_ranks):
            found[operator.__name__, "dim"] = refused(lambda operator=operator: operator(x, ours))
        return found

    for (name, kind), said in lab.launch(fn, 2)[0].items():
        with subtests.test(name=name, kind=kind):
            rule = f"a collective takes a process group, got {kind}; give "
            assert said.startswith("a dimension is a number, got ProcessGroup" if kind == "dim" else rule)
