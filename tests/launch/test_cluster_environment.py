"""Who started this process: torchrun's variables, whole, half and wrong, and what Slurm and Kubernetes set besides."""

import pytest

import dualpipe_lab as lab
from dualpipe_lab.launch.cluster.environment import Environment, cluster
from dualpipe_lab.launch.launcher import launch
from dualpipe_lab.train.options import on_nodes

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "192.0.2.10",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SLURM = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"}  # a task's
POD = {"JOB_COMPLETION_INDEX": "1"}


def without(variables, *names):
    return {name: value for name, value in variables.items() if name not in names}


BY_TORCHRUN = Environment(3, 4, 1, 2, 1, 2, "192.0.2.10", 29500, 2, "torchrun", agent_hosts_store=True)
STARTED = {
    "torchrun": (TORCHRUN, BY_TORCHRUN),
    "torchrun inside of Slurm and of a job": (POD | SLURM | TORCHRUN, BY_TORCHRUN),
    "a launcher that does not say where the nodes are": (
        {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")},
        Environment(3, 4, 0, None, None, None, "192.0.2.10", 29500),
    ),
    "nobody": ({}, None),
    "nobody, an address": ({"MASTER_ADDR": "192.0.2.10", "MASTER_PORT": "29500", "LOCAL_RANK": "0"}, None),
    "a job whose pods have nothing to do with each other": (POD, None),
    "a batch script": (without(SLURM, "SLURM_STEP_ID"), None),
    "a single task": (SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
}


def start(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("name", STARTED)
def test_who_started_this_process(name, monkeypatch):
    variables, expected = STARTED[name]
    assert cluster(variables) == expected
    start(monkeypatch, variables)
    assert lab.cluster() == expected


def test_places_in_words():
    assert str(BY_TORCHRUN) == "rank 3 of 4 on node 1 of 2, started by torchrun"


def test_unequal_nodes_and_ranks_in_another_order_than_that_of_the_nodes_are_seen():
    four = STARTED["a launcher that does not say where the nodes are"][0]
    cyclic = TORCHRUN | {"RANK": "1", "LOCAL_RANK": "0"}
    assert cluster(TORCHRUN).has_equal_nodes
    for variables in (TORCHRUN | {"WORLD_SIZE": "5", "RANK": "4"}, four, cyclic):
        assert not cluster(variables).has_equal_nodes


WRONG = [
    (without(TORCHRUN, "MASTER_PORT"), "got RANK, WORLD_SIZE, MASTER_ADDR without MASTER_PORT; set MASTER_PORT, or un"),
    ({"RANK": "0"}, "got RANK without WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
    (TORCHRUN | {"MASTER_ADDR": ""}, "without MASTER_ADDR"),
    ({"WORLD_SIZE": "2"}, "got WORLD_SIZE without RANK, MASTER_ADDR, MASTER_PORT"),
    (TORCHRUN | {"RANK": "4"}, "4 ranks are numbered 0 to 3, got number 4 from torchrun"),
    (TORCHRUN | {"LOCAL_RANK": "2"}, "2 ranks of a node are numbered 0 to 1, got number 2"),
    (TORCHRUN | {"GROUP_RANK": "7"}, "2 nodes are numbered 0 to 1, got number 7"),
    (TORCHRUN | {"WORLD_SIZE": "four"}, "WORLD_SIZE is a whole number from 1, got 'four'; set it so, or unset it"),
    (TORCHRUN | {"WORLD_SIZE": "0"}, "WORLD_SIZE is a whole number from 1, got '0'"),
    (TORCHRUN | {"RANK": "-1"}, "RANK is a whole number from 0, got '-1'"),
    (TORCHRUN | {"MASTER_PORT": "65536"}, "MASTER_PORT is at most 65535, got 65536"),
    (SLURM, "srun has started 4 tasks, and none of them has a RANK; start one task per node, and in it torchrun"),
]


def test_half_and_wrong_variables_are_refused():
    for variables, message in WRONG:
        with pytest.raises(ValueError, match=message):
            cluster(variables)


# ---- what launch and plans make of it


@pytest.mark.parametrize(
    ("variables", "world_size", "message"),
    [
        ({"RANK": "0"}, 2, "without WORLD_SIZE"),
        ({}, None, r"with world_size=None, where torchrun has started the ranks, and nobody has; give a"),
        (TORCHRUN, 2, "torchrun started 4 ranks, but the script launches 2; pass world_size=4, or None"),
    ],
)
def test_a_world_that_cannot_be_is_refused_before_a_process_starts(monkeypatch, variables, world_size, message):
    start(monkeypatch, variables)
    with pytest.raises(ValueError, match=message):
        launch(print, world_size)


def test_a_plan_takes_the_nodes_of_the_world():
    plan = lab.Plan(dp=4, zero=3, hybrid=True)
    found = on_nodes(plan, cluster(TORCHRUN))
    assert found.ranks_per_node == found.topology.ranks_per_node == 2
    assert "2 ranks per node" in str(found)
    assert on_nodes(found, cluster(TORCHRUN)) == found
    assert found.topology.groups("node") == ((0, 1), (2, 3))


def test_a_plan_keeps_what_no_starter_knows():
    plan, named = lab.Plan(dp=4), lab.Plan(dp=4, ranks_per_node=2)
    one_node = cluster(TORCHRUN | {"GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "4"})
    unknown = cluster({name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")})
    for started in (None, one_node, unknown):
        assert on_nodes(plan, started) == plan
        assert on_nodes(named, started) == named
    unequal = cluster(TORCHRUN | {"WORLD_SIZE": "5", "RANK": "4"})
    assert on_nodes(lab.Plan(dp=5), unequal) == lab.Plan(dp=5)


def test_a_plan_with_other_nodes_than_the_world_s_is_refused():
    with pytest.raises(
        ValueError, match=r"names ranks_per_node=4, and the 2 nodes that torchrun started have 2; leave"
    ):
        on_nodes(lab.Plan(dp=4, ranks_per_node=4), cluster(TORCHRUN))
    with pytest.raises(ValueError, match=r"names ranks_per_node=1, and the 2 nodes .* have unequal numbers of ranks"):
        on_nodes(lab.Plan(dp=5, ranks_per_node=1), cluster(TORCHRUN | {"WORLD_SIZE": "5", "RANK": "4"}))
