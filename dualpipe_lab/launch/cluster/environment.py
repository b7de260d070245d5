"""`Environment`: who started this process as one of several ranks, and on which node it is.

Chapter: book/appendix/gpus.  In: environment variables.  Out: one checked object; None for a process by itself.
  needed      RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
  optional    LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE; torchrun sets them, also inside of Slurm's
              `srun` and of a pod of Kubernetes
Elsewhere: `torch.distributed`'s `env://`; Lightning `ClusterEnvironment`, which reads Slurm's own variables too.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
ONE_MACHINE = "DUALPIPE_LAB_NODES_ON_ONE_MACHINE"  # set to 1: loopback reaches every node


@dataclass(frozen=True)
class Environment:
    """This process among the ranks that a starter has started.

    Attributes:
        rank, world_size: number of this rank, number of ranks.
        local_rank: number of this rank on its node, and of its GPU.
        ranks_per_node: ranks on this node; None if the starter does not say.
        node, num_nodes: number of this node, number of nodes; None if the starter does not say.
        master_addr, master_port: where the ranks meet; on the node of rank 0.
        restart: how often the starter has started these ranks again.
        starter: `torchrun`, or `the environment` where another launcher has set its variables.
        agent_hosts_store: the starter's own process listens at the master's port, and rank 0 does not.
        nodes_on_one_machine: all nodes are processes of this machine, so that loopback reaches them.

    Raises:
        ValueError: numbers that contradict each other.
    """

    rank: int
    world_size: int
    local_rank: int
    ranks_per_node: int | None
    node: int | None
    num_nodes: int | None
    master_addr: str
    master_port: int
    restart: int = 0
    starter: str = "the environment"
    agent_hosts_store: bool = False
    nodes_on_one_machine: bool = False

    def __post_init__(self) -> None:
        for name, number, size in (
            ("ranks", self.rank, self.world_size),
            ("ranks of a node", self.local_rank, self.ranks_per_node),
            ("nodes", self.node, self.num_nodes),
        ):
            if number is not None and size is not None and number >= size:
                raise ValueError(f"{size} {name} are numbered 0 to {size - 1}, got number {number} from {self.starter}")

    @property
    def is_one_machine(self) -> bool:
        """Whether loopback reaches every rank, as far as this process can tell."""
        return self.num_nodes == 1 or self.nodes_on_one_machine

    @property
    def has_equal_nodes(self) -> bool:
        """Whether every node has equally many ranks, with consecutive numbers, as far as this process can tell."""
        if self.ranks_per_node is None or self.node is None or self.num_nodes is None:
            return False
        is_consecutive = self.rank == self.node * self.ranks_per_node + self.local_rank
        return is_consecutive and self.ranks_per_node * self.num_nodes == self.world_size

    def __str__(self) -> str:
        node = "" if self.node is None else f" on node {self.node} of {self.num_nodes}"
        return f"rank {self.rank} of {self.world_size}{node}, started by {self.starter}"


def cluster(variables: Mapping[str, str] | None = None) -> Environment | None:
    """Return how `torchrun`, or a launcher that sets its variables, has started this process; None if none has.

    Args:
        variables: of the process (default: its own environment).

    Raises:
        ValueError: some of the variables are missing, or are no numbers; or `srun` has started several tasks without
            torchrun, each of which would be a world of its own.

    >>> print(cluster({"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "192.0.2.10", "MASTER_PORT": "29500"}))
    rank 3 of 4, started by the environment
    """
    found = {name: text for name, text in (os.environ if variables is None else variables).items() if text}
    if not {"RANK", "WORLD_SIZE"} & found.keys():
        if "SLURM_STEP_ID" in found and (_number(found, "SLURM_STEP_NUM_TASKS") or 1) > 1:
            raise ValueError(
                f"srun has started {found['SLURM_STEP_NUM_TASKS']} tasks, and none of them has a RANK; start one task "
                "per node, and in it torchrun with the script, as examples/cluster/train.sbatch does"
            )
        return None
    there = [name for name in _NEEDED if name in found]
    if missing := [name for name in _NEEDED if name not in found]:
        raise ValueError(
            f"a rank among others needs {', '.join(_NEEDED)}, got {', '.join(there)} without {', '.join(missing)}; "
            f"set {', '.join(missing)}, or unset {', '.join(there)} to start ranks here"
        )
    port = _number(found, "MASTER_PORT", least=1) or 0
    if port > 65_535:
        raise ValueError(f"MASTER_PORT is at most 65535, got {port}; choose one that is free on the node of rank 0")
    return Environment(
        rank=_number(found, "RANK") or 0,
        world_size=_number(found, "WORLD_SIZE", least=1) or 0,
        local_rank=_number(found, "LOCAL_RANK") or 0,
        ranks_per_node=_number(found, "LOCAL_WORLD_SIZE", least=1),
        node=_number(found, "GROUP_RANK"),
        num_nodes=_number(found, "GROUP_WORLD_SIZE", least=1),
        master_addr=found["MASTER_ADDR"],
        master_port=port,
        restart=_number(found, "TORCHELASTIC_RESTART_COUNT") or 0,
        starter="torchrun" if "TORCHELASTIC_RUN_ID" in found else "the environment",
        agent_hosts_store=found.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        nodes_on_one_machine=found.get(ONE_MACHINE) == "1",
    )


def _number(found: Mapping[str, str], name: str, least: int = 0) -> int | None:
    """The number in a variable; None where it is not set."""
    text = found.get(name)
    if text is None:
        return None
    if not re.fullmatch(r"\d{1,9}", text) or int(text) < least:
        raise ValueError(f"{name} is a whole number from {least}, got {text!r}; set it so, or unset it")
    return int(text)
