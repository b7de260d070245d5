"""The files for clusters fit each other, torchrun and the script; nothing is started but `bash -n`."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import scripts
import yaml
from torch.distributed.run import get_args_parser

import dualpipe_lab as lab

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "cluster"
README = (FOLDER / "README.md").read_text()
SBATCH = (FOLDER / "train.sbatch").read_text()
DEFAULT_SHUTDOWN_SECONDS = 30  # of torchrun, from the signal that it hands on to SIGKILL


def documents(name):
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def header():
    """The options in the `#SBATCH` lines."""
    pairs = re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", SBATCH, re.MULTILINE)
    assert len(pairs) == SBATCH.count("#SBATCH"), "an option is --name or --name=value"
    return dict(pairs)


def trainer():
    (job,) = documents("trainjob.yaml")
    return job["spec"]["trainer"]


def words_from(start, text):
    """The words of the one command of a shell text that begins with `start`; its lines end with a backslash."""
    (command,) = re.findall(rf"^{start} .*?[^\\]\n", text, re.MULTILINE | re.DOTALL)
    return shlex.split(command.replace("\\\n", " "))


def commands():
    """Every torchrun command: a name, its words, the variables around it, hosts and ranks per host that were meant."""
    yield "by hand", words_from("torchrun", README), {}, 2, 2
    *words, background = words_from("srun", SBATCH.replace("$SLURM_NNODES", header()["nodes"]))
    assert background == "&"
    yield "Slurm", words[words.index(".venv/bin/torchrun") :], {}, int(header()["nodes"]), 2
    _, job = documents("indexed-job.yaml")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    num_pods = job["spec"]["completions"]
    for index in range(num_pods):
        filled = [word.replace("$(JOB_COMPLETION_INDEX)", str(index)) for word in container["command"]]
        yield f"pod {index}", filled, {}, num_pods, 2
    nodes, ranks = trainer()["numNodes"], trainer()["numProcPerNode"]
    for index in range(nodes):
        found = {"NNODES": nodes, "NPROC_PER_NODE": ranks, "NODE_RANK": index}
        yield f"node {index}", trainer()["command"], {f"PET_{name}": str(n) for name, n in found.items()}, nodes, ranks
    (compose,) = documents("compose.yaml")
    for name, host in compose["services"].items():
        yield name, host["command"], host["environment"], 4, 2


COMMANDS = list(commands())


@pytest.mark.parametrize(("name", "words", "variables", "hosts", "ranks"), COMMANDS, ids=[row[0] for row in COMMANDS])
def test_a_command_starts_as_many_ranks_as_its_plan_has(name, words, variables, hosts, ranks, monkeypatch):
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)  # torchrun's parser takes its defaults from PET_*
    assert words[0].rpartition("/")[2] == "torchrun"
    started = get_args_parser().parse_args(words[1:])
    assert (int(started.nnodes), int(started.nproc_per_node)) == (hosts, ranks)
    script = ROOT / started.training_script
    assert script.is_file()
    module = scripts.load(script)
    monkeypatch.setattr("sys.argv", [str(script), *started.training_script_args])
    chosen = module.parse()
    assert chosen.folder
    assert chosen.elastic
    fields = (*module.COUNTS, "schedule", "zero", "sequence_parallel", "precision")
    plan = lab.Plan(**{field: getattr(chosen, field) for field in fields})
    plan.check(module.MODELS[chosen.model], chosen.sequence_length, hosts * ranks)
    assert chosen.global_batch % (plan.dp * plan.num_microbatches) == 0


def test_every_host_has_its_number():
    rows = [(words, variables) for name, words, variables, *_ in COMMANDS if name.startswith(("pod", "host"))]
    numbers = [
        variables.get("PET_NODE_RANK") or next(word for word in words if word.startswith("--node-rank="))[12:]
        for words, variables in rows
    ]
    assert numbers == ["0", "1", "0", "1", "2", "3"]


def seconds_to_shut_down(environment):
    return int({entry["name"]: entry["value"] for entry in environment}["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])


def check_pod(pod, environment):
    """Ranks have longer than torchrun's time to save, the pod longer than they; every mount has its volume."""
    (container,) = pod["containers"]
    seconds = seconds_to_shut_down(container.get("env", environment))
    assert DEFAULT_SHUTDOWN_SECONDS < seconds < pod["terminationGracePeriodSeconds"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    assert mounts == {"examples": "/app/examples", "checkpoints": "/checkpoints"}


def test_the_batch_script_parses_and_hands_on_the_signal_that_slurm_sends_it():
    done = subprocess.run(["bash", "-n", FOLDER / "train.sbatch"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    found = header()
    assert "requeue" in found
    assert (found["ntasks-per-node"], found["open-mode"]) == ("1", "append")
    first_command = re.search(r"^[^#\n]", SBATCH, re.MULTILINE).start()
    assert SBATCH.rindex("#SBATCH") < first_command, "sbatch reads no option behind the first command"
    (words,) = [words for name, words, *_ in COMMANDS if name == "Slurm"]
    name, seconds = re.fullmatch(r"B:(\w+)@(\d+)", found["signal"]).groups()
    assert f"SIG{name}" in words[words.index("--signals-to-handle") + 1].split(",")
    assert f"kill -{name} " in SBATCH
    shutdown = int(re.search(r"^export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=(\d+)$", SBATCH, re.MULTILINE)[1])
    assert DEFAULT_SHUTDOWN_SECONDS < shutdown < int(seconds)


def test_pods_find_each_other_and_have_time_to_save():
    service, job = documents("indexed-job.yaml")
    template, pod = job["spec"]["template"], job["spec"]["template"]["spec"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert pod["subdomain"] == service["metadata"]["name"]
    assert f"--master-addr={job['metadata']['name']}-0.{pod['subdomain']}" in pod["containers"][0]["command"]
    assert f"--master-port={service['spec']['ports'][0]['port']}" in pod["containers"][0]["command"]
    check_pod(pod, None)
    (patch,) = documents("trainjob.yaml")[0]["spec"]["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    check_pod(replicated["template"]["spec"]["template"]["spec"], trainer()["env"])


def test_containers_find_each_other_and_their_image_copies_what_is_there_and_let_through():
    (compose,) = documents("compose.yaml")
    for name, host in compose["services"].items():
        assert (host["hostname"], host["networks"]) == (name, list(compose["networks"]))
        assert "--master-addr=host0" in host["command"]
        assert int(host["stop_grace_period"].removesuffix("s")) > DEFAULT_SHUTDOWN_SECONDS
    builds = [host["build"] for host in compose["services"].values()]
    assert all(build == builds[0] for build in builds)
    assert (FOLDER / builds[0]["context"]).resolve() == ROOT
    text = builds[0]["dockerfile_inline"]
    assert not re.search(r"(?<!\$)\$(?!\$)", text), "compose replaces a single dollar sign"
    copied = [name for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for name in line.split()]
    let_through = re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert {"dualpipe_lab", "dualpipe_course", "pyproject.toml"} <= set(copied) <= set(let_through)
    assert all((ROOT / name).exists() for name in copied)


def test_the_library_reads_what_the_page_says_that_it_reads():
    sources = "\n".join(file.read_text() for file in (ROOT / "dualpipe_lab").rglob("*.py"))
    table = README.partition("\n## Variables that the library reads\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    listed = [name for cell in cells for name in re.findall(r"`([A-Z0-9_]+)`", cell)]
    assert len(listed) == len(set(listed)) > 14
    assert [name for name in listed if f'"{name}"' not in sources] == []
    environment = (ROOT / "dualpipe_lab" / "launch" / "cluster" / "environment.py").read_text()
    read = set(re.findall(r'"([A-Z]+(?:_[A-Z]+)*)"', environment))
    assert read <= set(listed)
