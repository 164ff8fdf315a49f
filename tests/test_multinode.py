"""Under torchrun: signals, dead and frozen ranks, restarts, two nodes (gloo on loopback, CPU).

Matrix cases 61, 62, 65-69, 71-73 and 105. Runs are compared with an undisturbed one on 1 rank.
Where torchrun is killed, and where it refuses, it is started as a person does; elsewhere it and its
ranks are forked from a process that has imported torch (Job), which is ten times as fast.
"""

import os
import random
import re
import signal
import time

import pytest
from conftest import finish, program, start
from processes import Fork, free_port, run_python
from test_distributed import assert_losses_agree, in_ranks, options, train_run

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="finds ranks in /proc")
STEPS = 80
TWO = ("--standalone", "--nproc_per_node=2")
MANY = dict(n_layer=1, batch_size=2, gradient_accumulation_steps=2, max_iters=STEPS,
            eval_interval=40, save_interval=10, dist_timeout=60)


@pytest.fixture(scope="module")
def undisturbed(data_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed")
    in_ranks(1, train_run, options(data_dir, out, **MANY))
    return out


def arguments(data_dir, out, **changes):
    return [f"--{k}={v}" for k, v in options(data_dir, out, **MANY | changes).items()]


def torchrun(*args):
    """`torchrun --run_path --start_method=fork ARGS`: ranks are forked from this process."""
    from torch.distributed import run

    from train import robust

    exit_process = robust.exit_process

    def rank(*args):
        """Which returns when all is well: torchrun waits for that."""
        try:
            robust.exit_process = lambda code: exit_process(code) if code else code
            run_python(args)
        except SystemExit as end:
            if end.code:
                raise
    run.run_script_path = rank
    run.main(["--run_path", "--start_method=fork", *args])


class Job:
    """torchrun in a forked process, with `output` for its output."""

    def __init__(self, output, *args, torchrun_args=TWO, env=None):
        output.touch()
        self.output = output
        self.fork = Fork(torchrun, (*torchrun_args, program(env), *args), env=env, stdout=output)
        self.pid = self.fork.process.pid

    def poll(self):
        return self.fork.wait(0)

    def kill(self):
        self.fork.kill()

    def text(self):
        return self.output.read_text(errors="replace")

    def finish(self, timeout=60):
        """(exit code, output)"""
        code = self.fork.wait(timeout)
        if code is None:
            self.kill()
        return code, self.text()


def ranks_of(torchrun):
    """The pids of the live ranks that torchrun has started, in the order of their ranks."""
    out = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as f:
                state, parent = f.read().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == torchrun.pid and state != "Z":
            out.append(int(name))
    return sorted(out)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, process, what, seconds=180):
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            output = process.text() if isinstance(process, Job) else process.stdout.read()
            pytest.fail(f"{what}: not within {seconds} s, or the run ended:\n{output}")
        time.sleep(0.02)


def last_step(out):
    try:
        with open(os.path.join(out, "metrics.jsonl")) as f:
            return sum('"loss"' in line for line in f) - 1
    except OSError:
        return -1


def wait_for_step(out, step, process):
    wait_until(lambda: last_step(out) >= step, process, f"step {step}")


# -----------------------------------------------------------------------------
# ranks that die, freeze or hang

@pytest.mark.ci
@pytest.mark.matrix(66, 67, 68, 72)
def test_killed_ranks_restart_and_a_frozen_one_goes_on(
        data_dir, tmp_path, undisturbed):
    p = Job(tmp_path / "said", *arguments(data_dir, tmp_path),
            torchrun_args=[*TWO, "--max-restarts=3"])
    wait_for_step(tmp_path, 5, p)
    frozen = ranks_of(p)[1]
    os.kill(frozen, signal.SIGSTOP)
    time.sleep(1)
    os.kill(frozen, signal.SIGCONT)
    for resumed, rank in enumerate((1, 0), start=1):
        at = max(12, last_step(tmp_path) + random.randint(1, 15))  # past the first checkpoint
        print("kill -9 of rank", rank, "at step", at)
        wait_for_step(tmp_path, at, p)
        os.kill(ranks_of(p)[rank], signal.SIGKILL)
        wait_until(lambda n=resumed: (tmp_path / "train.log").read_text().count("Resuming") == n, p,
                   "a restart that resumes")
    code, output = p.finish()
    assert code == 0, output
    assert "Another rank died" in output, output
    assert_losses_agree(tmp_path, undisturbed, STEPS)


@pytest.mark.ci
@pytest.mark.matrix(65, 69)
def test_an_error_in_a_rank_ends_the_job_with_its_traceback(data_dir, tmp_path):
    code, output = Job(tmp_path / "said", *arguments(data_dir, tmp_path),
                       env=dict(FAULT="before_step@15:1=raise")).finish()
    assert code == 1
    assert "[rank 1] RuntimeError: fault at before_step" in output
    assert last_step(tmp_path) == 14
    # The checkpoint is good, and the next start goes on from it: there rank 1 hangs.
    code, output = Job(tmp_path / "again", *arguments(data_dir, tmp_path, step_timeout=2),
                       env=dict(FAULT="before_step@16:1=sleep")).finish()
    assert code == 1
    assert "at iter 10" in output and output.count("step_timeout: 2 s are over") == 2
    assert "in act" in output  # where rank 1 hangs
    stacks = re.split(r"\[rank (\d)\]", (tmp_path / "stacks.txt").read_text())
    of_rank = dict(zip(stacks[1::2], stacks[2::2], strict=True))
    assert of_rank.keys() == {"0", "1"} and "in act" in of_rank["1"]
    assert "in max_over_ranks" in of_rank["0"] or "backward" in of_rank["0"]


@pytest.mark.ci
@pytest.mark.matrix(71)
def test_ranks_leave_when_torchrun_is_killed(data_dir, tmp_path):
    p = start(*arguments(data_dir, tmp_path, max_iters=6 * 10**4), ranks=2)
    wait_for_step(tmp_path, 2, p)
    ranks = ranks_of(p)
    assert len(ranks) == 2
    p.kill()
    deadline = time.monotonic() + 10
    while any(map(alive, ranks)) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = [pid for pid in ranks if alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


# -----------------------------------------------------------------------------
# asked to stop

@pytest.mark.matrix(61)
def test_sigterm_as_slurm_sends_it_stops_all_ranks_at_one_step(
        data_dir, tmp_path, undisturbed):
    p = Job(tmp_path / "said", *arguments(data_dir, tmp_path))
    wait_for_step(tmp_path, 13, p)
    for pid in (p.pid, *ranks_of(p)):  # a rank hears of it twice: torchrun tells it again
        os.kill(pid, signal.SIGTERM)
    code, output = p.finish()
    assert code == 1  # torchrun's code after any signal
    stopped = [line for line in output.splitlines() if line.startswith("Stopped at iter")]
    step = last_step(tmp_path) + 1
    assert len(stopped) == 1 and stopped[0].startswith(f"Stopped at iter {step}, saved.")
    assert output.count("stopping after this micro-batch") == 1
    end = output[output.index("stopping after this micro-batch"):]
    assert end.count("Saving checkpoint") == 1 and "Traceback (most recent call last)" not in (
        end.split("Stopped at iter")[0])
    in_ranks(1, train_run, options(data_dir, tmp_path, **MANY))  # what is left of the cluster
    assert_losses_agree(tmp_path, undisturbed, STEPS)


@pytest.mark.matrix(62)
def test_sigterm_to_one_rank_stops_all_and_saves(data_dir, tmp_path):
    p = Job(tmp_path / "said", *arguments(data_dir, tmp_path))
    wait_for_step(tmp_path, 13, p)
    os.kill(ranks_of(p)[1], signal.SIGTERM)
    code, output = p.finish()
    assert code == 1 and f"Stopped at iter {last_step(tmp_path) + 1}, saved." in output
    assert "exitcode  : 143" in output and "[rank" not in output


@pytest.mark.ci
@pytest.mark.matrix(105)
def test_problems_are_told_once_with_exit_code_2(tmp_path):
    code, output = finish(start("--batch_sise=3", "--batch_size=3", "--n_head=5",
                                "--gradient_accumulation_steps=1", f"--out_dir={tmp_path}",
                                ranks=2))
    assert code == 1  # torchrun's; those of the ranks:
    assert "exitcode  : 2" in output
    for text in ("configuration: 3 problems", "unknown key 'batch_sise'",
                 "valid numbers of ranks: 1, 3", "n_head (5)"):
        assert output.count(text) == 1, text
    assert "run_train.py\", line" not in output


# -----------------------------------------------------------------------------
# two nodes

def start_node(output, host, port, *args):
    return Job(output, *args, torchrun_args=[
        "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test",
        f"--rdzv-conf=is_host={host},last_call_timeout=2,keep_alive_interval=1,"
        "keep_alive_max_attempt=3"])


@pytest.mark.ci
def test_two_nodes_train_and_agree_and_one_goes_on_when_the_other_is_lost(
        data_dir, tmp_path, undisturbed):
    port = free_port()
    nodes = [start_node(tmp_path / f"said{host}", host, port, *arguments(data_dir, tmp_path))
             for host in (1, 0)]
    wait_for_step(tmp_path, 15, nodes[0])
    lost = ranks_of(nodes[1])
    assert len(ranks_of(nodes[0])) == len(lost) == 1
    nodes[1].kill()
    for pid in lost:
        os.kill(pid, signal.SIGKILL)
    code, output = nodes[0].finish()
    assert code == 0, output
    sizes = re.findall(r"world size (\d)", (tmp_path / "train.log").read_text())
    assert sizes[0] == "2" and sizes[-1] == "1"
    assert_losses_agree(tmp_path, undisturbed, STEPS)
