"""The files of train/launch/: two nodes of two ranks, with stand-ins for what starts them.

Each file is checked by its engine's own library, where that is installed (skypilot and dstack are
large, and not in tests/requirements.txt). The commands in it are executed with the environment that
the engine sets:
  SkyPilot    sky/skylet/constants.py (SKYPILOT_NODE_RANK, _NODE_IPS, _NUM_NODES)
  dstack      runner/internal/executor/executor.go (DSTACK_NODE_RANK, _MASTER_NODE_IP, _NODES_NUM)
  Trainer     pkg/runtime/framework/plugins/torch/torch.go (PET_NNODES, _NODE_RANK, _MASTER_ADDR)
  JobSet      Kubernetes' indexed jobs (JOB_COMPLETION_INDEX)
"""

import contextlib
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml
from processes import REPO, free_port
from runs import tensors
from test_distributed import assert_losses_agree
from test_multinode import Job, arguments, last_step, ranks_of

LAUNCH = REPO / "train/launch"
STEPS = 100
HEAD = "127.0.0.1"  # the nodes have 127.0.0.1 and 127.0.0.2

STUBS = dict(
    pip="exit 0",
    hostname=f'[ "$1" = -I ] && echo "{HEAD} 172.17.0.1 "',
    # Two nodes; the end of one ends both, as with --kill-on-bad-exit.
    srun=r"""shift
for id in 0 1; do
    SLURM_NODEID=$id "$@" &
    echo $! >> "$STATE/tasks"
done
for _ in 0 1; do wait -n || code=$?; done
exit ${code:-0}""",
    # To all processes of the tasks, and not to the script.
    scancel=r"""[ "$1" = --signal=TERM ] || exit 9
for task in $(cat "$STATE/tasks"); do kill -TERM $task $(pgrep -P $task); done""",
    scontrol='[ "$1 $2" = "requeue 7" ] && touch "$STATE/requeued"',
    # A copy of the script, started again while it asks for that.
    sbatch=r"""cp "$1" "$STATE/script"
shift
while :; do
    rm -f "$STATE/requeued" "$STATE/tasks"
    SLURM_JOB_ID=7 SLURM_NNODES=2 bash "$STATE/script" "$@" &
    echo $! > "$STATE/batch"
    wait $!
    code=$?
    [ -e "$STATE/requeued" ] || exit $code
done""")

SSH = f"""#!{sys.executable}
import os, pty, sys  # a terminal of its own: SIGHUP to what runs in it, when this process ends
option, host, command = sys.argv[1:]
assert option == "-tt" and host in ("127.0.0.1", "127.0.0.2")
child, terminal = pty.fork()
if not child:
    os.execvp("bash", ["bash", "-c", command])
try:
    while data := os.read(terminal, 1 << 16):
        os.write(1, data)
except OSError:  # the other side is closed
    pass
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.fixture
def node_environment(tmp_path):
    """The environment of a node: stubs before everything else, two ranks, a free port."""
    folder = tmp_path / "bin"
    folder.mkdir()
    texts = {name: f"#!/bin/bash\n{text}\n" for name, text in STUBS.items()} | dict(ssh=SSH)
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return os.environ | dict(PATH=f"{folder}:{pathlib.Path(sys.executable).parent}:"
                             + os.environ["PATH"],
                             STATE=str(tmp_path), NPROC="2", PORT=str(free_port()))


def load(name):
    return list(yaml.safe_load_all((LAUNCH / name).read_text()))


def node_commands(name, args):
    """[(argv, environment) of each node] of a YAML file, or the one of a script."""
    if name == "slurm.sh":
        return [(["sbatch", "train/launch/slurm.sh", *args], {})]
    if name == "ssh.sh":
        return [(["train/launch/ssh.sh", "127.0.0.1 127.0.0.2", *args], {})]
    first = load(name)[0]
    nodes = []
    for rank in ("0", "1"):
        env = dict(ARGS=shlex.join(args))
        if name == "skypilot.yaml":
            script = first["setup"] + "\n" + first["run"]
            env |= dict(SKYPILOT_NUM_NODES=str(first["num_nodes"]), SKYPILOT_NODE_RANK=rank,
                        SKYPILOT_NODE_IPS=f"{HEAD}\n127.0.0.2")
            nodes.append((["bash", "-c", script], env))
        if name == "dstack.yaml":
            env |= dict(DSTACK_NODES_NUM=str(first["nodes"]), DSTACK_NODE_RANK=rank,
                        DSTACK_MASTER_NODE_IP=HEAD)
            nodes.append((["bash", "-c", " && ".join(first["commands"])], env))
        if name == "trainjob.yaml":
            trainer = first["spec"]["trainer"]
            env |= dict(PET_NNODES=str(trainer["numNodes"]), PET_NODE_RANK=rank,
                        PET_MASTER_ADDR=HEAD, PET_MASTER_PORT="29400",
                        PET_NPROC_PER_NODE=str(trainer["numProcPerNode"]))
            nodes.append(([*trainer["command"], *args], env))
        if name == "jobset.yaml":
            job = first["spec"]["replicatedJobs"][0]["template"]["spec"]
            container = job["template"]["spec"]["containers"][0]
            env |= {e["name"]: e["value"] for e in container["env"]}
            assert env["NODES"] == str(job["completions"]) == str(job["parallelism"])
            assert env["HEAD"] == "irongpt-node-0-0.irongpt"  # JOBSET-JOB-INDEX-POD.JOBSET
            env |= dict(JOB_COMPLETION_INDEX=rank, HEAD=HEAD)
            nodes.append(([*container["command"], *args], env))
    return nodes


ALL = sorted(path.name for path in LAUNCH.iterdir() if path.name != "node.sh")


def start(name, args, environment, output):
    with open(output, "a") as file:
        return [subprocess.Popen(argv, env=environment | env, cwd=REPO, stdout=file, stderr=file,
                                 stdin=subprocess.DEVNULL, start_new_session=True)
                for argv, env in node_commands(name, args)]


def end(processes):
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# -----------------------------------------------------------------------------
# what they start

def test_every_file_starts_the_same_command(node_environment, tmp_path):
    stub = tmp_path / "bin/torchrun"
    stub.write_text('#!/bin/bash\necho "$@" >> "$STATE/commands"\n')
    stub.chmod(0o755)
    args = ["--config", "train/config.yaml", "--out_dir", "/shared/out"]
    port = node_environment["PORT"]
    wanted = [f"--nnodes=2 --node_rank={rank} --nproc_per_node=2 --master_addr={HEAD} "
              f"--master_port={port} --max_restarts=3 run_train.py {' '.join(args)}"
              for rank in (0, 1)]
    for name in ALL:
        processes = start(name, args, node_environment, tmp_path / "output")
        assert [p.wait(20) for p in processes] == [0] * len(processes), (
            name, (tmp_path / "output").read_text())
        assert sorted((tmp_path / "commands").read_text().splitlines()) == wanted, name
        (tmp_path / "commands").unlink()


def test_the_arguments_in_the_files_are_those_of_run_train():
    """Also the address of a mirror, since the machines of these engines do not share a folder."""
    from train.config import load_config
    sky, dstack = load("skypilot.yaml")[0]["envs"], load("dstack.yaml")[0]["env"]
    args = [sky["ARGS"].split(), dstack[0].removeprefix("ARGS=").split(),
            load("trainjob.yaml")[0]["spec"]["trainer"]["args"],
            load("jobset.yaml")[0]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
            ["spec"]["containers"][0]["args"]]
    for argv in args:
        assert load_config(None, argv).mirror == "s3://bucket/run1"


def test_gloo_uses_the_interface_that_reaches_the_first_node(monkeypatch):
    from train.distributed import choose_interface
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    choose_interface("no such name")
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    choose_interface("127.0.0.2")
    assert os.environ.pop("GLOO_SOCKET_IFNAME") == "lo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    choose_interface("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"


# -----------------------------------------------------------------------------
# what the engines accept

def lost(data, parsed, path=""):
    """The paths of what a model of `data` does not have: fields that the engine does not know."""
    if isinstance(data, dict):
        return [p for k, v in data.items() for p in (
            lost(v, parsed[k], f"{path}.{k}") if k in parsed else [f"{path}.{k}"])]
    if isinstance(data, list):
        return [p for i, (a, b) in enumerate(zip(data, parsed)) for p in lost(a, b, f"{path}.{i}")]
    return [] if data == parsed else [path]


def test_kubernetes_files_have_the_fields_of_kubeflow_and_jobset():
    models = pytest.importorskip("kubeflow_trainer_api.models")
    kinds = dict(TrainJob=models.TrainerV1alpha1TrainJob, JobSet=models.JobsetV1alpha2JobSet,
                 TrainingRuntime=models.TrainerV1alpha1TrainingRuntime)
    for data in [*load("trainjob.yaml"), *load("jobset.yaml")]:
        assert not lost(data, kinds[data["kind"]].from_dict(data).to_dict())
    with_error = load("jobset.yaml")[0]
    with_error["spec"]["failurePolicy"]["maxRestart"] = 3
    assert lost(with_error, kinds["JobSet"].from_dict(with_error).to_dict())


def test_dstack_accepts_its_file():
    configurations = pytest.importorskip("dstack._internal.core.models.configurations")
    task = configurations.parse_run_configuration(load("dstack.yaml")[0])
    assert (task.nodes, task.retry.duration) == (2, 7 * 24 * 3600)


def test_skypilot_accepts_its_file():
    sky = pytest.importorskip("sky")
    task = sky.Task.from_yaml(str(LAUNCH / "skypilot.yaml"))
    assert task.num_nodes == 2 and [r.use_spot for r in task.resources] == [True]


# -----------------------------------------------------------------------------
# runs: preempted once, and continued

@pytest.fixture(scope="module")
def undisturbed(data_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed")
    code, output = Job(out / "output", *arguments(data_dir, out, max_iters=STEPS),
                       torchrun_args=["--standalone", "--nproc_per_node=4"]).finish()
    assert code == 0, output
    return out


def wait_until(condition, processes, output):
    deadline = time.monotonic() + 120
    while not condition():
        if time.monotonic() > deadline or any(p.poll() is not None for p in processes):
            end(processes)
            pytest.fail(output.read_text())
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_a_preempted_run_ends_as_an_undisturbed_one(
        name, data_dir, tmp_path, undisturbed, node_environment):
    out, output = tmp_path / "out", tmp_path / "output"
    args = arguments(data_dir, out, max_iters=STEPS)
    processes = start(name, args, node_environment, output)
    wait_until(lambda: last_step(out) >= 25, processes, output)
    if name == "slurm.sh":  # as at the time limit; the stand-in for sbatch starts it again
        os.kill(int((tmp_path / "batch").read_text()), signal.SIGTERM)
    else:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        codes = [process.wait(60) for process in processes]
        assert all(codes), (codes, output.read_text())
        assert 25 <= last_step(out) < STEPS - 1
        processes = start(name, args, node_environment, output)
    try:
        codes = [process.wait(120) for process in processes]
    finally:
        end(processes)
    log = (out / "train.log").read_text()
    assert not any(codes) and log.count("Stopped at iter") == 1, output.read_text()
    assert log.count("Resuming") == 1 and "world size 4" in log
    # Not to the bit: DDP orders its buckets anew after the first step of every start, and with them
    # the sums over four ranks (over two, a sum has one order).
    assert_losses_agree(out, undisturbed, STEPS)
    ours, wanted = (tensors(folder / "ckpt.pt")[0] for folder in (out, undisturbed))
    for tensor in wanted:
        torch.testing.assert_close(ours[tensor], wanted[tensor], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_a_killed_rank_restarts_all_nodes(data_dir, tmp_path, undisturbed, node_environment):
    out, output = tmp_path / "out", tmp_path / "output"
    nodes = start("jobset.yaml", arguments(data_dir, out, max_iters=STEPS), node_environment,
                  output)
    wait_until(lambda: last_step(out) >= 25, nodes, output)
    os.kill(ranks_of(nodes[1])[0], signal.SIGKILL)
    try:
        codes = [node.wait(120) for node in nodes]
    finally:
        end(nodes)
    assert codes == [0, 0], output.read_text()
    assert (out / "train.log").read_text().count("Resuming") == 1
    assert_losses_agree(out, undisturbed, STEPS)


@pytest.fixture
def two_machines():
    """(namespace, address) of two network namespaces that reach each other by an address only."""
    names = [f"iron{os.getpid()}{letter}" for letter in "ab"]
    script = "set -e\n" + "".join(f"ip netns add {name}\n" for name in names)
    script += f"ip link add v0 netns {names[0]} type veth peer name v1 netns {names[1]}\n"
    script += "".join(f"ip -n {name} addr add 10.77.0.{i + 1}/24 dev v{i}\n"
                      f"ip -n {name} link set v{i} up\nip -n {name} link set lo up\n"
                      for i, name in enumerate(names))
    try:
        if subprocess.run(["bash", "-c", script], capture_output=True).returncode:
            pytest.skip("cannot create network namespaces")
        yield [(name, f"10.77.0.{i + 1}") for i, name in enumerate(names)]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.slow
def test_host_names_that_do_not_resolve_do_not_matter(
        two_machines, data_dir, tmp_path, undisturbed, node_environment):
    out, output = tmp_path / "out", tmp_path / "output"
    args = arguments(data_dir, out, max_iters=STEPS)
    with open(output, "a") as file:
        nodes = [subprocess.Popen(
            ["ip", "netns", "exec", namespace, "unshare", "--uts", "bash", "-c",
             f'/usr/bin/hostname unknown-{rank} && exec "$@"', "node", "train/launch/node.sh", "2",
             str(rank), two_machines[0][1], *args],
            env=node_environment, cwd=REPO, stdout=file, stderr=file, start_new_session=True)
            for rank, (namespace, _) in enumerate(two_machines)]
    try:
        codes = [node.wait(120) for node in nodes]
    finally:
        end(nodes)
    assert codes == [0, 0], output.read_text()
    assert_losses_agree(out, undisturbed, STEPS)
