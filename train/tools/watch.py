"""A page on which runs are watched while they train: python -m train.tools.watch out/

Loss curves, the newest lines and the last samples of the runs in a folder, of the newest ones. It
reads nothing but their files, and of these what is new; all that takes a hundredth of a core at
most, however many ask, or else they wait. It listens on this machine alone; from another one:
ssh -L 8001:127.0.0.1:8001 NAME
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import sys
import time
from pathlib import Path

from model.serve import listen, stop_signals
from model.serve.site import Site
from train.base.cli import run_command
from train.options.loss_svg import COLORS, X_LABELS, loss_svg, read_records

FILES = ("metrics.jsonl", "train.log", "samples.txt")  # of a run
DEPTH = 3            # folders below the one that is watched
HIDDEN = re.compile(r"\.|old_\d+$")  # and what a run has moved aside
KEPT = 3000          # records of a run
SHARE = 0.01         # of a core: the most that all of it takes, or else the page waits,
LONGEST = 30.0       # seconds at most,
BURST = 0.3          # but for so many at once after a while of doing little
EVERY = 1.0          # seconds between two looks at the files
NARROW = 420         # pixels
LINES, TAIL = 12, 1 << 14  # the newest ones; bytes at the end of a file, of which they are


class Grown:
    """What a file has that only grows, or is another one from some moment on: a resumed run writes
    its metrics anew, up to where it goes on."""

    def __init__(self, path):
        self.path, self.inode, self.at = path, None, 0

    def more(self):
        """(whether all before is void, the whole lines since the last call, as bytes)"""
        try:
            with open(self.path, "rb") as f:
                now = os.fstat(f.fileno())
                anew = now.st_ino != self.inode or now.st_size < self.at
                self.inode, self.at = now.st_ino, 0 if anew else self.at
                f.seek(self.at)
                data = f.read()
        except OSError:
            return False, []
        whole = data[:data.rfind(b"\n") + 1]
        self.at += len(whole)
        return anew, whole.splitlines()


class Run:
    """A run's folder, and what is known of it so far."""

    def __init__(self, folder):
        self.folder, self.seen, self.records = folder, None, []
        self.metrics = Grown(folder / FILES[0])

    def look(self):
        """Read what is new; whether anything is."""
        seen = [stamp(self.folder / name) for name in FILES]
        if seen == self.seen:
            return False
        self.seen = seen
        anew, lines = self.metrics.more()
        if not anew and len(self.records) + len(lines) > 2 * KEPT:  # all of it again, thinned out
            self.metrics = Grown(self.metrics.path)
            anew, lines = self.metrics.more()
        self.records = ([] if anew else self.records) + read_records(lines, 1 + len(lines) // KEPT)
        return True

    def card(self, name, color):
        """What the page shows of it beside the curves."""
        steps, evaluations = ([{}, *(r for r in self.records if k in r)]
                              for k in ("loss", "val_loss"))
        found = [v for r in evaluations if isinstance(v := r.get("val_loss"), float)]
        written = re.split(r"^(?==== iter )", tail(self.folder / FILES[2]), flags=re.MULTILINE)
        last = written[-1].partition("\n")[0]
        return dict(
            name=name, color=color, changed=max(at for at, _ in self.seen),
            iter=self.records[-1]["iter"] if self.records else None, best=min(found, default=None),
            loss=steps[-1].get("loss"), tokens_per_sec=steps[-1].get("tokens_per_sec"),
            val_loss=evaluations[-1].get("val_loss"),
            lines=tail(self.folder / FILES[1]).splitlines()[:-LINES - 1:-1],
            sample="".join(text for text in written if text.partition("\n")[0] == last).strip())


def stamp(path):
    """(when it was written, how long it is), (0, 0) where it is not there."""
    with contextlib.suppress(OSError):
        found = os.stat(path)
        return found.st_mtime, found.st_size
    return 0, 0


def tail(path):
    """The text at the end of a file, "" where there is none."""
    with contextlib.suppress(OSError), open(path, "rb") as f:
        f.seek(max(0, os.fstat(f.fileno()).st_size - TAIL))
        return f.read().decode("utf-8", "replace")
    return ""


def find_runs(tops):
    """Folders of runs, the `tops` themselves or below them, with the newest last."""
    found = set()
    for top in tops:
        for folder, below, files in os.walk(top):
            deep = len(Path(folder).relative_to(top).parts)
            below[:] = [b for b in below if deep < DEPTH and not HIDDEN.match(b)]
            if {*FILES[:2]} & {*files}:
                found.add(Path(folder))
    return sorted(found, key=lambda f: max(stamp(f / name)[0] for name in FILES))


class Watch(Site):
    """The page of the newest `most` runs in the folders `tops`."""

    def __init__(self, listening, tops, most, x, metric):
        super().__init__(listening)
        self.tops, self.most, self.x, self.metric = tops, most, x, metric
        self.runs, self.version, self.due, self.state, self.drawn = {}, 0, 0.0, b"", {}
        self.credit, self.at, self.spent = BURST, time.monotonic(), time.process_time()
        html = Path(__file__).with_name("watch.html").read_bytes()
        self.routes = {"/": ("GET", lambda c: self.reply_page(c, html)),
                       "/state": ("GET", self.tell_state),
                       "/wide": ("GET", self.chart), "/narrow": ("GET", self.chart)}

    def owed(self):
        """Seconds until all that was spent so far is SHARE of the time again."""
        now, spent = time.monotonic(), time.process_time()
        self.credit = min(BURST, self.credit + SHARE * (now - self.at)) - (spent - self.spent)
        self.credit, self.at, self.spent = max(self.credit, -SHARE * LONGEST), now, spent
        return max(0.0, -self.credit / SHARE)

    def look(self):
        if time.monotonic() < self.due:
            return
        self.due = time.monotonic() + EVERY
        folders = sorted(find_runs(self.tops)[-self.most:])
        runs = {f: self.runs.get(f) or Run(f) for f in folders}
        news = [r.look() for r in runs.values()]
        if any(news) or runs.keys() != self.runs.keys() or not self.version:
            self.runs, self.version, self.drawn = runs, time.time(), {}
            cards = [r.card(self.name(f), i) for i, (f, r) in enumerate(runs.items())]
            self.state = json.dumps(dict(version=self.version, colors=COLORS, runs=cards)).encode()

    def name(self, folder):
        names = [str(folder.relative_to(t)) for t in self.tops if folder.is_relative_to(t)]
        return next((n for n in names if n != "."), folder.name)

    # what is asked for

    async def tell_state(self, c):
        await asyncio.sleep(self.owed())
        self.look()
        await c.reply(200, self.state)

    async def chart(self, c):
        """The curves of what /state told last."""
        if c.path not in self.drawn:
            width, most = (960, 100) if c.path == "/wide" else (NARROW, 24)  # letters of a name
            runs = [(self.name(f)[-most:], r.records) for f, r in self.runs.items()]
            self.drawn[c.path] = loss_svg(runs, self.x, self.metric, width=width).encode()
        await c.reply(200, self.drawn[c.path], "image/svg+xml")


def main(argv=None):
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m train.tools.watch", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", default=["out"], help="folders of runs (out)")
    parser.add_argument("--port", type=int, default=8001, help="0: any free one (%(default)s)")
    parser.add_argument("--runs", type=int, default=len(COLORS), help="the newest (%(default)s)")
    parser.add_argument("--x", choices=list(X_LABELS), default="iter", help="axis (%(default)s)")
    parser.add_argument("--metric", default="loss", help="another number, as of train.plot")
    return run_command(parser, watch, argv)


def watch(args):
    """What the command line asks for, until a signal."""
    missing = [f for f in args.folders if not os.path.isdir(f)]
    if missing:
        raise ValueError(f"{', '.join(missing)}: no such folder")
    with listen("127.0.0.1", args.port) as listening:
        site = Watch(listening, [Path(f) for f in args.folders], args.runs, args.x,
                     args.metric.removeprefix("val_"))
        stopped = stop_signals()
        print(f"Watching {', '.join(args.folders)}: http://127.0.0.1:{site.port}. Ctrl-C ends it.",
              flush=True)
        if hasattr(os, "nice"):
            os.nice(19)  # what trains goes first
        site.serve(stopped)


if __name__ == "__main__":
    sys.exit(main())
