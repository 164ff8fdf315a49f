"""The machine is not what the run hoped for: devices, memory, pipes, clocks, environment variables.

Matrix cases 89 and 106 to 117, but 108 and 112 under torchrun only as far as one process shows
them.
"""

import errno
import os
import platform
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from browser import soon
from conftest import REPO, run, tiny_args
from processes import Fork, run_python
from runs import Program, assert_same, go, metrics, run_program

from train import robust
from train.base import cli
from train.base.errors import CheckpointError, DataError
from train.checkpoint import load_checkpoint
from train.config import TrainConfig
from train.train import train


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, data_dir):
    out = tmp_path_factory.mktemp("undisturbed")
    go(data_dir, out)
    return out


def file_cut_short():
    """train.bin ends, between the check and the read of its 30th window, where it begins."""
    from data.token_files import TokenStream
    from train import dataloader
    dataloader.CHUNK_TOKENS, real, reads = 1, TokenStream._map, []

    def _map(self, i):
        tokens, path = real(self, i), self.shards[i].path
        reads.append(path.endswith("train.bin"))
        if sum(reads) == 30 and reads[-1]:
            os.truncate(path, 0)
        return tokens
    TokenStream._map = _map


@pytest.mark.matrix(89)
@pytest.mark.skipif(not hasattr(signal, "SIGBUS"), reason="needs POSIX")
def test_data_cut_short_while_being_read_cost_no_checkpoint(tmp_path, data_dir, undisturbed):
    """the mapped file ends under a read, or its disk fails -> SIGBUS ends the process, the
    checkpoint is whole, and with the file back the end is exact"""
    shutil.copytree(data_dir, tmp_path / "data")
    out = tmp_path / "out"
    code, text = run_program(tmp_path / "data", out, prepare=file_cut_short)
    assert code == -signal.SIGBUS, text
    assert load_checkpoint(out / "ckpt.pt")["iter_num"] in (5, 10)
    shutil.copy(data_dir / "train.bin", tmp_path / "data")
    go(tmp_path / "data", out)
    assert_same(undisturbed, out)


@pytest.mark.matrix(89)
def test_data_that_cannot_be_reached_are_named(tmp_path, data_dir, undisturbed, monkeypatch):
    """an I/O error when the data file is looked at -> the file and the reason are named; when it
    has passed, the run goes on to the exact end"""
    stat, asked = os.stat, []

    def failing(path, *args, **kwargs):
        if str(path).endswith("train.bin"):
            asked.append(path)
            if len(asked) > 25:
                raise OSError(errno.EIO, "Input/output error")
        return stat(path, *args, **kwargs)
    monkeypatch.setattr("train.dataloader.CHUNK_TOKENS", 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", failing)
        with pytest.raises(DataError, match="train.bin: .*Input/output error"):
            go(data_dir, tmp_path)
    go(data_dir, tmp_path)
    assert_same(undisturbed, tmp_path)


@pytest.mark.matrix(106)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA GPU here")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_device_that_is_not_there_is_refused(tmp_path, data_dir, device):
    """device: cuda where there is none -> exit 2, one line that says so and names --device cpu"""
    code, text = run_program(data_dir, tmp_path / "out", device=device)
    assert code == 2 and "GPUs are needed on this machine, torch" in text
    assert "--device cpu" in text and len(text.splitlines()) == 1


@pytest.mark.matrix(107)
def test_where_there_is_no_bfloat16_that_is_said(tmp_path, data_dir, monkeypatch, capsys):
    """dtype auto and bfloat16 where the device cannot -> auto takes another and says why; what was
    asked for is done, and called slow"""
    monkeypatch.setattr("train.device.has_native_bfloat16", lambda device: False)
    go(data_dir, tmp_path / "a", dtype="auto", max_iters=1)
    assert "Precision: float32 (no native bfloat16 on this device)" in capsys.readouterr().out
    go(data_dir, tmp_path / "b", dtype="bfloat16", max_iters=1)
    assert "Precision: bfloat16 (configured; emulated and slow" in capsys.readouterr().out


@pytest.mark.matrix(108)
def test_a_port_in_use_is_named(tmp_path, data_dir):
    """the rendezvous port is taken -> exit code not 0, torch's message with the port is kept"""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = str(s.getsockname()[1])
        env = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
                   MASTER_PORT=port)
        code, text = run_program(data_dir, tmp_path / "out", env=env)
    assert code != 0 and "address already in use" in text.lower() and port in text


@pytest.mark.matrix(109)
@pytest.mark.parametrize("env, missing", [(dict(RANK="0"), "WORLD_SIZE"),
                                          (dict(RANK="x", WORLD_SIZE="2", LOCAL_RANK="0"), "RANK")])
def test_half_an_environment_is_refused(tmp_path, data_dir, env, missing):
    """RANK without WORLD_SIZE, or no number -> exit 2, the variable named, torchrun advised"""
    env = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="1") | env
    code, text = run_program(data_dir, tmp_path / "out", env=env)
    assert code == 2 and text.startswith("environment: ") and missing in text, text
    assert "torchrun --nproc_per_node" in text and "Traceback" not in text


@pytest.mark.matrix(110)
def test_an_unsafe_torch_loads_nothing(tmp_path, monkeypatch):
    """a torch whose weights_only is known not to hold -> nothing is loaded with it"""
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    with pytest.raises(CheckpointError, match="torch 2.9.1.cpu cannot load files safely"):
        load_checkpoint(tmp_path / "ckpt.pt")


@pytest.mark.matrix(111)
def test_out_of_memory_advises_a_batch_that_fits(tmp_path, data_dir):
    """out of memory in the first step -> exit 1, advice with a batch and accumulation that keep the
    global batch"""
    code, text = run_program(data_dir, tmp_path / "out", env={"FAULT": "mid_backward@0=oom"})
    assert code == 1 and "Out of memory. Try --batch_size 1 --gradient_accumulation_steps 4" in text
    assert "Traceback" not in text


@pytest.mark.matrix(112)
def test_out_of_memory_on_one_rank_ends_the_job(tmp_path, data_dir):
    """out of memory on rank 1 of 2 -> the whole job ends, exit code not 0, rank 1 says why, the
    checkpoint is whole"""
    began = time.monotonic()
    args = tiny_args(data_dir=data_dir, out_dir=tmp_path / "out", save_interval=2, vocab_size=256)
    code, text = run(*args, ranks=2, env={"FAULT": "mid_backward@5:1=oom"}, timeout=60)
    assert code != 0 and "[rank 1] Out of memory. Try" in text and time.monotonic() - began < 55
    assert load_checkpoint(tmp_path / "out" / "ckpt.pt")["iter_num"] in (2, 4, 5)


def limit_memory():
    with open("/proc/self/statm") as f:
        used = int(f.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 96 * 2**20, resource.RLIM_INFINITY))


@pytest.mark.matrix(113)
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux's /proc")
def test_too_little_host_memory_is_said(tmp_path, data_dir):
    """a checkpoint larger than the memory there is (RLIMIT_AS) -> exit 2, file and reason named"""
    big = tmp_path / "big.pt"
    torch.save({"model": {"wte.weight": torch.zeros(2**25)}}, big)
    code, text = run_program(data_dir, tmp_path / "out", "--init_from", str(big),
                             prepare=limit_memory)
    assert code == 2 and f"{big}: " in text and "allocate memory" in text, text
    assert "Traceback" not in text


@pytest.mark.matrix(114)
def test_a_closed_output_does_not_end_the_run(tmp_path, data_dir):
    """stdout closed after the first line, as by `| head -1` -> training goes on to its end"""
    out, pipe = tmp_path / "out", tmp_path / "pipe"
    os.mkfifo(pipe)
    with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as stdout:
        program = Fork(run_python, (["run_train.py", *tiny_args(
            data_dir=data_dir, out_dir=out)],), stdout=pipe)
        soon(lambda: b"\n" in (stdout.read(1) or b""), 60)
    assert program.wait(60) == 0
    assert load_checkpoint(out / "ckpt.pt")["iter_num"] == 10
    assert len([m for m in metrics(out) if "loss" in m]) == 10


def exit_unflushed(arguments):
    """`python ARGUMENTS` in a fork, whose end would otherwise write to stdout again."""
    try:
        run_python(arguments)
    except SystemExit as end:
        os._exit(end.code)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("option", ["--help", "--print_config", "--dry_run"])
def test_a_printout_on_a_full_disk_is_one_message(tmp_path, data_dir, option):
    errors = tmp_path / "errors"
    arguments = ["run_train.py", *tiny_args(data_dir=data_dir, out_dir=tmp_path), option]
    assert Fork(exit_unflushed, (arguments,), stdout="/dev/full", stderr=errors).wait(180) == 2
    assert errors.read_text() == "run_train.py: [Errno 28] No space left on device\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("tool, option", [("lr_finder", "--steps=10"), ("hpo", "--space={}/s")])
def test_a_tool_on_a_full_disk_ends_with_one_message(tmp_path, data_dir, tool, option):
    """No trial of a search is left running."""
    optuna = pytest.importorskip("optuna")
    (tmp_path / "s").write_text("dropout: [0.0]\nstages: [{trials: 1}]\n")
    errors = tmp_path / "errors"
    arguments = ["-m", f"train.tools.{tool}", option.format(tmp_path), *tiny_args(
        data_dir=data_dir, out_dir=tmp_path / "out", max_iters=2, eval_interval=1)]
    assert Fork(exit_unflushed, (arguments,), stdout="/dev/full", stderr=errors).wait(180) == 2
    assert errors.read_text() == f"train.tools.{tool}: [Errno 28] No space left on device\n"
    if tool == "hpo":
        study = optuna.load_study(study_name="stage_1",
                                  storage=f"sqlite:///{tmp_path}/out/study.db")
        assert [t.state.name for t in study.trials] == ["FAIL", "WAITING"]


def test_an_error_of_a_dry_run_has_its_traceback(capsys):
    """Also one about a file, e.g. in a model of one's own."""
    def job(config):
        open("missing.npy")
    assert robust.run_reporting_errors(TrainConfig(dry_run=True), job, prints=True) == 1
    error = capsys.readouterr().err
    assert "Traceback" in error and "missing.npy" in error


@pytest.mark.matrix(114)
def test_output_on_a_full_disk_is_one_warning(tmp_path, data_dir, undisturbed):
    """stdout, train.log and metrics.jsonl on a full disk -> one warning each at most, the training
    goes on, the checkpoint is whole"""
    out = tmp_path / "out"
    code, text = run_program(data_dir, out, env={"FAULT": "log_open=enospc"})
    assert code == 0 and 2 <= text.count("No space left") <= 4, text
    a, b = (load_checkpoint(p / "ckpt.pt")["model"] for p in (undisturbed, out))
    assert all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.matrix(114)
def test_a_folder_full_at_the_start_is_a_warning(tmp_path, data_dir, monkeypatch, capsys):
    """config.yaml and training_args.json cannot be written -> a warning, the run goes on"""
    def full(*_):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr("train.logger.write_text", full)
    assert go(data_dir, tmp_path, max_iters=1)["iter_num"] == 1
    assert "training_args.json were not written: [Errno 28] No space" in capsys.readouterr().out


@pytest.mark.matrix(115)
def test_a_clock_that_jumps_backwards_does_no_harm(tmp_path, data_dir, undisturbed, monkeypatch):
    """the wall clock jumps back by an hour at every reading -> times in the log stay positive,
    saves go on, the end is exact"""
    now = [1.7e9]

    def backwards():
        now[0] -= 3600
        return now[0]
    monkeypatch.setattr(time, "time", backwards)
    go(data_dir, tmp_path)
    assert_same(undisturbed, tmp_path)
    assert "time -" not in (tmp_path / "train.log").read_text()


def slow_disk():
    """Every write takes half a millisecond longer; a checkpoint is about 250: longer than the
    two steps from one save to the next."""
    from train.base.tensors import HashingFile
    real = HashingFile.write

    def write(self, data):
        time.sleep(0.0005)
        return real(self, data)
    HashingFile.write = write


@pytest.mark.ci
@pytest.mark.matrix(116, 117)
def test_four_runs_on_a_busy_machine_end_as_alone(tmp_path, data_dir, undisturbed):
    """four runs at once, a process that burns a CPU, a slow disk (at length: test_soak.py) -> all
    end, each exactly as alone"""
    with subprocess.Popen(["sh", "-c", "while :; do :; done"]) as hog:
        try:
            runs = [Program(data_dir, tmp_path / str(i), prepare=slow_disk, save_interval=2)
                    for i in range(4)]
            codes = [program.wait(120)[0] for program in runs]
        finally:
            hog.kill()
    assert codes == [0, 0, 0, 0]
    for i in range(4):
        assert_same(undisturbed, tmp_path / str(i))


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc only")
@pytest.mark.skipif(sys.platform != "linux", reason="libgomp's variable")
@pytest.mark.parametrize("policy, spins", [(None, "10000"), ("PASSIVE", "0")])
def test_idle_threads_soon_sleep_beside_other_programs(tmp_path, data_dir, policy, spins):
    """libgomp itself says how long they spin; a policy of the user's own is kept"""
    env = dict(OMP_DISPLAY_ENV="VERBOSE") | (dict(OMP_WAIT_POLICY=policy) if policy else {})
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        code, text = run(*tiny_args(data_dir=data_dir, out_dir=tmp_path, max_iters=0), env=env)
    finally:
        for other in others:
            other.kill()
    assert code == 0 and f"GOMP_SPINCOUNT = '{spins}'" in text


@pytest.mark.parametrize("running, set_to", [("1/300", None), ("2/300", "10000"), ("", None)])
def test_threads_spin_as_usual_on_a_quiet_machine(tmp_path, monkeypatch, running, set_to):
    if running:
        (tmp_path / "loadavg").write_text(f"3.10 2.00 1.00 {running} 1234\n")
    monkeypatch.setattr(cli, "LOADAVG", str(tmp_path / "loadavg"))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop("GOMP_SPINCOUNT", None)
    cli.limit_spinning()
    assert os.environ.get("GOMP_SPINCOUNT") == set_to


@pytest.mark.ci
def test_memory_of_a_step_is_kept_for_the_next():
    """In a process of its own: page faults of allocating and freeing 64 MB again and again."""
    code = """if True:
        import resource, sys
        import torch
        from train.config import TrainConfig
        from train.distributed import process_group
        from train.base.memory import return_freed_memory

        def faults():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for _ in range(10):
                torch.ones(1 << 24)
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        def resident():
            with open("/proc/self/statm") as f:
                return int(f.read().split()[1]) * resource.getpagesize()

        without = faults()
        with process_group(TrainConfig(device="cpu")):
            faults()
            kept, held = faults(), resident()
            return_freed_memory()
            print(without, kept, held - resident())"""

    def process(**env):  # not a fork, whose heap may have something at its end that holds all
        return subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True,
                              text=True, env=os.environ | env)
    done = process()
    without, kept, returned = map(int, done.stdout.split())
    assert kept < 100 < without / 10, done.stderr
    assert returned > 50e6
    done = process(MALLOC_TOP_PAD_="131072")
    assert int(done.stdout.split()[1]) > 1000, done.stderr  # what the user chose, stays


def test_a_file_without_permission_is_one_line(data_dir, tmp_path, monkeypatch, capsys):
    names = os.listdir

    def listdir(path):  # root may read everything
        if str(path) == str(data_dir):
            raise PermissionError(13, "Permission denied", path)
        return names(path)
    monkeypatch.setattr(os, "listdir", listdir)
    config = TrainConfig(device="cpu", data_dir=str(data_dir), out_dir=str(tmp_path / "out"))
    assert robust.run_reporting_errors(config, train) == 2
    assert capsys.readouterr().err == f"{data_dir}: Permission denied\n"
