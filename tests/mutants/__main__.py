"""Mutation testing: would the tests find a fault? python -m tests.mutants --seed 1 --count 400
[--files 'train/*.py' ...]

Small faults (see mutate.py) at random lines of the program are applied one at a time to a copy of
the repository. The tests that run that line are run there, the closest and fastest first, until one
fails. A mutant that survives needs a new test, or a line in equivalent.txt with the reason why it
changes nothing. `--planted` tries the faults of planted.py instead, `--again FILE` the survivors of
an earlier `--out FILE`.

Which tests run a line is determined by running each of them once (20 minutes), and stored in the
file --map; later only tests that have changed are run again (all: delete the file). A mutant then
takes seconds, a survivor up to --budget seconds of tests. With `--keep-map` no test is run for the
map.
"""

import argparse
import collections
import fnmatch
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.mutants import mutate, runner
from tests.mutants.covered import Map, program_files
from tests.mutants.planted import FAULTS

REPO = Path(__file__).resolve().parent.parent.parent
FIRST, QUICK = 10, 1.0  # tests that are tried first, and seconds that each of them may take


class Mutant:
    """A mutation of the file `path` of the program, with its source (bytes)."""

    def __init__(self, path, source, mutation):
        self.path, self.mutation, self.source = path, mutation, source
        self.old, self.new = mutation.shown(source)

    def __str__(self):
        return f"{self.path}:{self.mutation.line}  {self.old}  ->  {self.new}"

    @property
    def key(self):
        return self.path, self.old, self.new

    @property
    def around(self):
        """The text of the mutated line and of the lines before and after it."""
        n = self.mutation.line
        return "\n".join(self.source.decode().splitlines()[n - 2:n + 1])


# -----------------------------------------------------------------------------
# which mutants

def shares(lines, count):
    """Return {file: share of `count`}, integers with the sum `count`, in proportion to `lines`
    {file: number of lines}."""
    total = sum(lines.values())
    exact = {f: count * n / total for f, n in lines.items()}
    out = {f: int(x) for f, x in exact.items()}
    for f in sorted(exact, key=lambda f: out[f] - exact[f])[:count - sum(out.values())]:
        out[f] += 1
    return out


def draw(files, count, seed):
    """Return a list of `count` Mutants of `files` {path: source}, at most one per line, at random
    lines. Those of a file depend only on its text, on how many it gets, and on the seed."""
    lines = {path: len(mutate.code_lines(source)) for path, source in files.items()}
    out = []
    for path, share in shares({p: n for p, n in lines.items() if n}, count).items():
        rng, by_line = random.Random(f"{seed} {path}"), collections.defaultdict(list)
        for m in mutate.mutations(files[path]):
            by_line[m.line].append(m)
        chosen = []
        for line in rng.sample(sorted(by_line), len(by_line)):
            if len(chosen) < share:
                options = rng.sample(by_line[line], len(by_line[line]))
                good = next((m for m in options if mutate.works(m, files[path])), None)
                chosen += [good] if good else []
        out += [Mutant(path, files[path], m) for m in sorted(chosen, key=lambda m: m.start)]
    return out


def planted(files, words):
    """Return the list of mutants of planted.py in `files` {path: source}; with `words`, those whose
    path or text contains one of them."""
    out = []
    for path, old, new in FAULTS:
        homes = [path] if old.encode() in files.get(path, b"") else [
            f for f, source in files.items() if old.encode() in source]
        if words and not any(w in f"{path} {old}" for w in words):
            continue
        if len(homes) != 1:
            print(f"stale: {path}: {old!r} stands in {homes or 'no file'}")
            continue
        source = files[homes[0]]
        start = source.index(old.encode())
        out.append(Mutant(homes[0], source, mutate.Mutation(
            source[:start].count(b"\n") + 1, start, start + len(old.encode()), new)))
    return out


def again(files, path):
    """Return the list of mutants of `files` {path: source} that survived in the results file
    `path`, identified by the text of their lines."""
    wanted = {key for key, (by, *_) in read_results(path).items() if by is None}
    out = {}
    for path in {key[0] for key in wanted} & set(files):
        for m in mutate.mutations(files[path]):
            mutant = Mutant(path, files[path], m)
            if mutant.key in wanted:
                out.setdefault(mutant.key, mutant)
    for key in wanted - set(out):
        print("gone:", *key)
    return list(out.values())


def read_results(path):
    """Return {Mutant.key: (id of the test that failed, or None; number of tests not run; seconds)}
    from a file of results, written with --out; {} if there is none."""
    lines = Path(path).read_text().splitlines() if path and Path(path).exists() else ()
    return {tuple(r["key"]): (r["by"], r["left"], r["seconds"]) for r in map(json.loads, lines)}


def equivalent():
    """Return {Mutant.key: reason} of the mutants in equivalent.txt, which change nothing and are
    not tried."""
    out = {}
    for line in (Path(__file__).parent / "equivalent.txt").read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            path, change, reason = line.split(" :: ")
            out[(path, *change.split(" ==> "))] = reason
    return out


# -----------------------------------------------------------------------------
# which tests

def stages(known, tests, budget, text):
    """Return ([tests to run first, others], number of tests left out). First are fast tests that
    run few other lines, and fast tests that have words in common with `text`, the lines around the
    mutant; the others are limited to `budget` seconds, the fastest of each file first. known: a
    Map; tests: ids."""
    close = sorted(tests, key=lambda t: (known.seconds(t) > QUICK, known.footprint(t), t))
    first = [t for t in close[:FIRST] if known.seconds(t) <= QUICK]
    alike = sorted((t for t in tests if known.seconds(t) <= 3 * QUICK and t not in first),
                   key=lambda t: (-known.likeness(t, text), known.seconds(t), t))
    first += alike[:FIRST]
    by_file = collections.defaultdict(list)
    for test in sorted(set(tests) - set(first), key=lambda t: (known.seconds(t), t)):
        by_file[test.split("::")[0]].append(test)
    rounds, rest = itertools.zip_longest(*by_file.values()), []
    for test in filter(None, itertools.chain.from_iterable(rounds)):
        budget -= known.seconds(test)
        if budget > 0:
            rest.append(test)
    place = {t: i for i, t in enumerate(close)}
    nearest = {f: min(place[t] for t in ts) for f, ts in by_file.items()}

    def order(test):
        slow = int(known.seconds(test) > 0.3) + int(known.seconds(test) > 3)
        return slow, nearest[test.split("::")[0]], place[test]
    return [s for s in (first, sorted(rest, key=order)) if s], len(tests) - len(first) - len(rest)


def attempt(mutant, slot, lists, known, sound, patience):
    """Run the tests `lists` on a mutant, in a forked process with the folder `slot`. Return (id of
    a test that fails only with the mutant, or None; tests that fail also without it; {test that
    passed: seconds}). known: a Map; sound: tests known to pass without mutants; patience: see
    run_tests()."""
    runner.adopt_orphans()
    file, broken, took = slot / "repo" / mutant.path, [], {}

    def run(tests, patience):
        return runner.run_tests(slot / "repo", slot, tests, known.limit, patience, took)

    def put(source, later):
        status = (REPO / mutant.path).stat()
        file.write_bytes(source)
        # Bytecode is current by size and time, in seconds, of its source.
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + later * 10**9))
    for tests in lists:
        while tests := [t for t in tests if not {t, t.split("::")[0]} & set(broken)]:
            put(mutant.mutation.apply(mutant.source), 7 + random.randrange(10**6))
            failed = run(tests, patience)
            put(mutant.source, 0)
            if not failed:
                break
            test = failed.removeprefix("no ").removeprefix("end: ")
            if failed in sound or not run([test], 10 * patience):
                return failed, broken, took
            broken.append(test)  # of a file that cannot be collected all tests
    return None, broken, took


# -----------------------------------------------------------------------------
# the campaign

class Pool:
    """Runs jobs in forked processes, `workers` at a time, each in a slot: a folder with a copy of
    the repository."""

    def __init__(self, folder, workers):
        self.slots, self.running = [], {}
        for i in range(workers):
            slot = Path(folder) / str(i)
            slot.mkdir()
            runner.copy_repository(REPO, slot)
            self.slots.append(slot)

    def run(self, jobs, work, done):
        """Run work(job, slot) for all jobs, each in a fork; when one ends, call done(job, result or
        None if it crashed, seconds) in this process."""
        jobs = iter(jobs)
        while True:
            while self.slots and (job := next(jobs, None)) is not None:
                slot = self.slots.pop()

                def save(job=job, slot=slot):
                    (slot / "result").write_text(json.dumps(work(job, slot)))
                (slot / "result").unlink(missing_ok=True)
                self.running[runner.forked(save)] = job, slot, time.monotonic()
            if not self.running:
                return
            pid, _ = os.wait()
            if pid not in self.running:  # what a job left behind
                continue
            job, slot, began = self.running.pop(pid)
            self.slots.append(slot)
            result = slot / "result"
            done(job, json.loads(result.read_text()) if result.exists() else None,
                 time.monotonic() - began)


def update_map(known, pool):
    """Run the tests that are new or changed since the Map `known` was written, and add their lines
    to it."""
    def record(job, slot):
        runner.adopt_orphans()
        return runner.record(slot / "repo", slot, *job)

    def done(job, output, seconds):
        file, names = job
        if output is None:
            print(f"map: tests/{file} did not end", flush=True)
            return
        known.add(file, names, output)
        print(f"map: {len(names)} of tests/{file}, {seconds:.0f} s", flush=True)
    pool.run(known.stale(), record, done)


def campaign(mutants, known, pool, a):
    """Try the mutants. Return (list of (mutant, failed test or None, number of tests not run,
    seconds), list of (mutant, reason) of equivalent ones). known: a Map; a: the command's
    options."""
    reasons, tried = equivalent(), {} if a.again else read_results(a.out)
    results = [(m, *tried[m.key]) for m in mutants if m.key in tried and m.key not in reasons]
    todo = [m for m in mutants if m.key not in reasons and m.key not in tried]
    sound, n = set(), len(results) + len(todo)
    lists = {m: stages(known, known.tests_of(m.path, m.mutation.line), a.budget, m.around)
             for m in todo}

    def done(mutant, result, seconds):
        by, broken, took = result or ("the process itself", [], {})
        known.learn(took)
        for test in broken:
            print(f"fails without a mutant: {test}", flush=True)
        if by:
            sound.add(by)
        results.append((mutant, by, lists[mutant][1], seconds))
        print(f"{len(results)}/{n} {seconds:.0f} s  {mutant}  |  "
              f"{by or ('SURVIVED' if lists[mutant][0] else 'no test of it is known')}",
              flush=True)
        if a.out:
            with open(a.out, "a") as f:
                f.write(json.dumps(dict(key=mutant.key, line=mutant.mutation.line, by=by,
                                        left=lists[mutant][1], seconds=seconds)) + "\n")
    pool.run(todo, lambda m, slot: attempt(m, slot, lists[m][0], known, sound, a.patience), done)
    known.save()
    return results, [(m, reasons[m.key]) for m in mutants if m.key in reasons]


def report(results, same):
    """Print a table by file, and the survivors; return their number. results, same: the two lists
    of campaign()."""
    rows = collections.defaultdict(lambda: [0, 0, 0])
    for mutant, by, *_ in results:
        for name in (mutant.path, "all"):
            rows[name][0 if by else 1] += 1
    for mutant, _ in same:
        for name in (mutant.path, "all"):
            rows[name][2] += 1
    print("\n| file | drawn | noticed | survived | equivalent |\n|---|---|---|---|---|")
    for name, (noticed, survived, equal) in sorted(rows.items(), key=lambda r: (r[0] == "all", r)):
        print(f"| {name} | {noticed + survived + equal} | {noticed} | {survived} | {equal} |")
    survivors = [r for r in results if not r[1]]
    for mutant, _, left, _ in sorted(survivors, key=lambda r: (r[0].path, r[0].mutation.line)):
        print(f"survived: {mutant}" + (f"  ({left} slower tests not run)" if left else ""))
    return len(survivors)


def main(args):
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="with --planted: faults with one of these in them")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=400, help="mutants to draw")
    parser.add_argument("--files", nargs="+", default=["*"], help="patterns of their paths")
    parser.add_argument("--planted", action="store_true", help="the faults of planted.py")
    parser.add_argument("--again", metavar="FILE", help="the survivors in these results")
    parser.add_argument("--out", metavar="FILE", help="append results, a line of JSON each; those "
                        "that are there are not tried again")
    parser.add_argument("--budget", type=float, default=60, help="seconds of tests for a mutant")
    parser.add_argument("--patience", type=float, default=20, help="seconds that a test may take, "
                        "beside 5 times what it usually takes; one that takes longer has noticed")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--map", default=Path(tempfile.gettempdir()) / "mutants_map.json")
    parser.add_argument("--keep-map", action="store_true", help="do not bring the map up to date")
    parser.add_argument("--list", action="store_true", help="print the mutants and end")
    a = parser.parse_args(args)
    files = {p: (REPO / p).read_bytes() for p in program_files(REPO)
             if any(fnmatch.fnmatch(p, pattern) for pattern in a.files)}
    if a.planted:
        mutants = planted(files, a.words)
    else:
        mutants = again(files, a.again) if a.again else draw(files, a.count, a.seed)
    if a.list:
        print(*mutants, sep="\n")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # with what it started, and copied
    runner.warm_up(REPO)
    runner.adopt_orphans()
    try:
        with tempfile.TemporaryDirectory() as folder:
            pool, known = Pool(folder, a.workers), Map(a.map, REPO)
            if not a.keep_map:
                update_map(known, pool)
            return report(*campaign(mutants, known, pool, a))
    finally:
        runner.end_children()


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
