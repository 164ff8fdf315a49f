"""Do the tests notice? A slow campaign: python tests/mutants.py [NUMBER or WORD...]

Each fault below is put into a copy of the repository, alone, and the tests that should notice are
run there until the first one fails. Half a minute a fault; `survived` in the table is a test to be
written, `stale` a line that the program no longer has. WORDs choose faults by their file or text.
"""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

REPO = pathlib.Path(__file__).resolve().parent.parent
LIMIT = 120  # seconds; what hangs is noticed
# Tests that should notice: "file" or "file -k words".
SPLIT, GRADIENT = "seam -k any_split", "seam -k gradient"
WORLD, SCHEDULE = "seam -k any_world_size and 2-ddp", "steering -k schedule"
SPIKES, CLIP, VALIDATION = "numerics -k 78", "reported -k clipped", "reported -k weighs"
RESUME, ORDER = "resume -k 42_43_44", "dataloader -k golden"

# (file, what stands there, the fault, tests)
FAULTS = [
    # the loop
    ("train/train.py", "loss * weight / n)", "loss * weight)", SPLIT),
    ("train/train.py", 'extra["count"] / full_count if "count" in extra else 1.0', "1.0", SPLIT),
    ("train/train.py", 'if "count" in extra:  #', "if False:  #", GRADIENT),
    ("train/train.py", "get(first + micro)", "get(first)", "train -k mean"),
    ("train/train.py", "first = (it + p.data_shift) * n", "first = it * n", SPIKES),
    ("train/train.py", "seed_step(c.seed, it, ranks.rank)", "seed_step(c.seed, 0, ranks.rank)",
     "train -k dropout"),
    ("train/train.py", "seed_step(c.seed, it, ranks.rank)", "seed_step(c.seed, it, 0)",
     "distributed -k dropout"),
    ("train/train.py", "get_lr(it, c)", "get_lr(it + 1, c)", SCHEDULE),
    ("train/train.py", "get_lr(it, c) * self.plateau.scale", "get_lr(it, c)",
     "steering -k plateau"),
    ("train/train.py", 'group["initial_lr"] * (lr / c.learning_rate)', "lr",
     "steering -k lr_groups"),
    ("train/train.py", "        self.optimizer.zero_grad(set_to_none=True)\n        p.iter_num",
     "        p.iter_num", RESUME),
    ("train/train.py", "            self.model.after_step(it, sums)", "            pass",
     "seam -k after_every_step"),
    ("train/train.py", '"skip" if verdict == "skip" else "update"', '"update"', SPIKES),
    ("train/train.py", "p.loss_sum, p.loss_count = p.loss_sum + loss,",
     "p.loss_sum, p.loss_count = loss,", "train -k train_loss"),
    ("train/train.py", "return done or p.iter_num % c.eval_interval == 0",
     "return p.iter_num % c.eval_interval == 0", "train -k promised"),
    ("train/train.py", "and self.stopping.sign * watched < p.best_metric",
     "and watched < p.best_metric", "seam -k own_metric"),
    ("train/train.py", "p.evaluated, p.val_loss = p.iter_num, ", "p.evaluated, p.val_loss = -1, ",
     "resume -k crash"),
    ("train/train.py", "passed = bad + 1 - p.iter_num", "passed = bad - p.iter_num", SPIKES),
    ("train/train.py", "self.log.rewind(p.iter_num, ", "self.log.rewind(10**9, ",
     "resume -k crash"),
    # numbers
    ("train/evaluate.py", 'precise) * out["count"]', "precise)", VALIDATION),
    ("train/evaluate.py", "rows[:n - first, :-1]", "rows[:, :-1]",
     "distributed -k same_number"),
    ("train/evaluate.py", "index = first + ranks.rank", "index = first",
     "distributed -k same_number"),
    ("train/evaluate.py", "for name in sorted(sums)])", "for name in sums])",
     "seam -k after_every_step"),
    ("train/evaluate.py", "    dist.all_reduce(vector)\n", "", WORLD),
    ("train/evaluate.py", "total[name] + value if", "value if", "train -k mean"),
    # the loader
    ("train/dataloader.py", "* self.world_size + self.rank", "* self.world_size",
     "dataloader -k 53"),
    ("train/dataloader.py", "hash64(seed, epoch, i)", "hash64(seed, epoch * np.uint64(0), i)",
     ORDER),
    ("train/dataloader.py", "ROUNDS = 6", "ROUNDS = 4", ORDER),
    ("train/dataloader.py", "(phase + window", "(window", ORDER),
    ("train/dataloader.py", "* self.n_fit // n", "", "dataloader -k fixed"),
    ("train/dataloader.py", "self.loader.get_batch(self.device, step)",
     "self.loader.get_batch(self.device, max(0, step - 1))", SPIKES),
    ("train/dataloader.py", "(first, first + shard.n_tokens - n)", "(first,)",
     "dataloader -k fingerprint"),
    ("train/dataloader.py", "for part in (array[:n], array[-n:])", "for part in ()",
     "seam -k other_rows"),
    # the schedule
    ("train/lr_scheduler.py", "        return c.learning_rate * (it + 1) / (warmup + 1)",
     "        return c.learning_rate * (it + 1) / warmup", SCHEDULE),
    ("train/lr_scheduler.py", "max(c.final_lr, c.learning_rate * c.lr_factor ** drops)",
     "c.learning_rate * c.lr_factor ** drops", SCHEDULE),
    ("train/lr_scheduler.py", "c.wsd_decay * c.decay_end", "c.decay_end", SCHEDULE),
    ("train/lr_scheduler.py", "max(self.least, self.scale * self.factor)",
     "self.scale * self.factor", "reported -k plateau"),
    ("train/lr_scheduler.py", "self.best - self.min_delta", "self.best",
     "steering -k early_stopping"),
    ("train/lr_scheduler.py", "self.best, self.bad = self.sign * value, 0",
     "self.best = self.sign * value", "steering -k better_value"),
    # a GPU
    ("train/guard.py", "model.compile(dynamic=False)", "model.compile()", "gpu_paths -k partial"),
    ("train/train.py", "self.compiler.call(self.model, *batch)", "self.model(*batch)",
     "gpu_paths -k fails_in_validation"),
    ("train/report.py", "column = 0 if dtype != torch.float32 else 1 if tf32 else 2", "column = 0",
     "gpu_paths -k peak"),
    ("train/dry_run.py", "copies = 2 if", "copies = 1 if", "gpu_paths -k copies"),
    # the optimizer
    ("train/optimizer.py", "torch.clamp(max_norm /", "torch.clamp(2 * max_norm /", CLIP),
    ("train/optimizer.py", "get_total_norm(grads)) * factor", "get_total_norm(grads))", GRADIENT),
    ("train/optimizer.py", "if p.dim() >= 2 else 0.0", "if p.dim() >= 1 else 0.0", "optimizer"),
    ("train/muon.py", "max(1.0, p.size(0) / p.size(1)) ** 0.5", "1.0", "optimizer"),
    ("train/muon.py", "range(rank * share, (rank + 1) * share)", "range(share)",
     "distributed -k muon"),
    ("train/muon.py", "orthogonalize(rows.redistribute(placements=[Shard(0)]).to_local())",
     "orthogonalize(rows.full_tensor())[:len(parts) // 2]", "distributed -k muon"),
    ("train/optimizer.py", "_supports_amp_scaling = False", "_supports_amp_scaling = True",
     "numerics -k 76"),
    ("train/optimizer.py", "in model.named_parameters() if p.requires_grad",
     "in model.named_parameters()", "seam -k froze"),
    # checkpoints
    ("train/checkpoint.py", "            os.fsync(f.fileno())\n        for name in links",
     "        for name in links", "checkpoint_write -k durable"),
    ("train/checkpoint.py", "            link(path, prev_path(path))", "            pass",
     "checkpoint_write -k durable"),
    ("train/checkpoint.py", "        sync_folder(folder)\n    except", "    except",
     "checkpoint_write -k durable"),
    ("train/checkpoint.py", "if sha.hexdigest().encode() != trailer", "if b'' == trailer",
     "checkpoint_read -k 25"),
    ("train/checkpoint.py", 'map_location="cpu", weights_only=True', 'map_location="cpu", '
     "weights_only=False", "checkpoint_read -k 27"),
    ("train/checkpoint.py", "return out.copy_(t.detach(), non_blocking=t.is_cuda)",
     "return t", "checkpoint_write -k snapshot"),
    ("train/checkpoint.py", "        try:  # from here on nothing can be lost",
     "        if True:  # from here on nothing can be lost\n"
     "            prune(self.path, self.keep_last)\n"
     "            if self.save_precision:\n"
     "                self.export(state[\"model\"])\n"
     "        try:",
     "checkpoint_write -k export"),
    ("train/checkpoint.py", "numbered(folder)[:-keep]", "numbered(folder)[:-keep - 1]",
     "checkpoint_write -k keep_last"),
    ("train/checkpoint.py", 'os.replace(path, free_name(folder, "ckpt_bad"))', "pass",
     "checkpoint_read -k 19_to_24"),
    ("train/checkpoint.py", 'for k in ("model", "optimizer") if k in state}', "for k in ()}",
     "checkpoint_read -k not_finite"),
    # going on
    ("train/resume.py", 'if state["data"] != (now := data.train.fingerprint())',
     "if (now := 0)", "checkpoint_read -k 52"),
    ("train/resume.py", '[] if "all" in allowed else', "[] if allowed else",
     "reported -k names_keys"),
    ("train/resume.py", "mark.read_text() == job", "True", "reported -k spares"),
    ("train/resume.py", "if theirs and ours and theirs != ours", "if False",
     "reported -k another_tokenizer"),
    ("train/resume.py", 'elif f.name != "block_size"', "elif False", "reported -k architecture"),
    # guards, ranks
    ("train/guard.py", "<= MAX_OVERFLOWS_IN_A_ROW", "<= 10**9", "numerics -k without_end"),
    ("train/guard.py", "math.isfinite(loss) and math.isfinite(norm)", "math.isfinite(loss)",
     "numerics -k 75"),
    ("train/guard.py", "max_over_ranks([self.stop, save], ranks)", "[self.stop, save]",
     "distributed -k 54"),
    ("train/distributed.py", "isinstance(model, DistributedDataParallel) and not last",
     "isinstance(model, DistributedDataParallel)", "distributed -k gradients_with"),
    ("train/distributed.py", "model.initial(name, tensors[name].shape, seed)",
     "model.initial(name, tensors[name].shape, seed + 1)", "distributed -k same_weights"),
    ("train/distributed.py", "* 65_537 + rank)", "* 65_537)", "distributed -k random_draws"),
    ("train/distributed.py", "libc.mallopt(M_TRIM_THRESHOLD, -1)", "pass",
     "environment -k memory_of"),
    ("train/distributed.py", "ctypes.CDLL(None).malloc_trim(0)", "pass",
     "environment -k memory_of"),
    # sampling
    ("model/generate.py", "ends[:, -1:], right=True)", "ends[:, -1:])", "sample -k draw"),
    ("model/generate.py", "((logits - largest) / temperature)", "(logits / temperature)",
     "sample -k near_zero"),
    ("model/sample/compiled.py", "torch.where(self.here, self.new, self.kv)", "self.kv",
     "sample -k compiled_tokens"),
    ("model/sample/compiled.py", "<= used)", "<= used - 1)", "sample -k compiled_tokens"),
    ("model/sample/compiled.py", "kv.index_copy_(4, slot[None], torch.stack(cache.new))", "pass",
     "sample -k compiled_tokens"),
    ("train/logger.py", "int(whole[1]) < iter + ", "int(whole[1]) <= iter + ", "logger -k twice"),
]


def notice(repo, tests):
    """(whether a test fails in `repo`, the first line that says which)."""
    name, _, words = tests.partition(" -k ")
    command = [sys.executable, "-m", "pytest", f"tests/test_{name}.py", "-x", "-q", "--no-header",
               "-p", "no:cacheprovider", "--durations=0", *(["-k", words] if words else [])]
    process = subprocess.Popen(command, cwd=repo, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, start_new_session=True, env=os.environ | {
                                   "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"})
    try:
        output = process.communicate(timeout=LIMIT)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the ranks that it has started
        process.wait()
        return True, f"no end within {LIMIT} s"
    if process.returncode == 5:
        return False, f"no test of tests/test_{name}.py is chosen by {words!r}"
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return process.returncode != 0, failed[0].split(" - ")[0] if failed else ""


def main(words):
    """Try the faults that the words choose; the number of those that no test has noticed."""
    missed = 0
    print("| | file | fault | noticed by | s |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        repo = pathlib.Path(folder) / "repo"
        shutil.copytree(REPO, repo, ignore=shutil.ignore_patterns(".git", "out", "bin", "__pyc*"))
        for number, (file, old, new, tests) in enumerate(FAULTS, 1):
            if words and str(number) not in words and not any(w in file + old for w in words):
                continue
            text, began = (repo / file).read_text(), time.monotonic()
            if old in text:
                (repo / file).write_text(text.replace(old, new))
                noticed, by = notice(repo, tests)
                (repo / file).write_text(text)
            else:
                noticed, by = False, "stale"
            missed += not noticed
            shown = " ".join(f"{old} => {new or 'nothing'}".split()).replace("|", "\\|")
            by = by.replace("FAILED ", "") if noticed else f"**survived** {by}"
            print(f"| {number} | {file} | `{shown}` | {by} | {time.monotonic() - began:.0f} |",
                  flush=True)
    print(f"\n{missed} not noticed")
    return missed


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
