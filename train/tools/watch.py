"""Show runs on a local web page during training: python -m train.tools.watch out/

The page has the loss curves, the last log lines and the last samples of the newest runs in a
folder. Files are read after every change; reading and drawing use about 1% of a CPU core. The
server listens on 127.0.0.1 only. From another machine: ssh -L 8001:127.0.0.1:8001 HOST
"""

import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from train.base.cli import run_command
from train.base.fields import key
from train.options.loss_svg import COLORS, X_LABELS, loss_svg, read_metrics

METRICS, LOG, SAMPLES = FILES = ("metrics.jsonl", "train.log", "samples.txt")  # of a run
MAX_DEPTH = 3          # of folders below the watched folder
SKIPPED_FOLDERS = re.compile(r"\.|old_\d+$")  # old_N: renamed by --resume never
MAX_TRAINING_LINES = 3000  # read per run, evenly spaced
LOG_LINES = 12
TAIL_BYTES = 1 << 14   # of the log and of the samples
PICTURES = {"/wide": (960, 100), "/narrow": (420, 24)}  # pixels, characters per name
MIN_INTERVAL_SECONDS = 1.0   # between two updates,
CPU_SHARE = 0.01             # longer if updates would use more than this share of a CPU core,
MAX_INTERVAL_SECONDS = 30.0  # up to this length
CONTENT_POLICY = ("default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
                  "connect-src 'self'; img-src data:; base-uri 'none'; frame-ancestors 'none'")


@dataclass
class WatchOptions:
    """Show the loss curves, log lines and samples of runs on a local web page during training."""
    folders: list[str] = key(["out"], "folders of runs (out)", positional=True, metavar="FOLDER")
    port: int = key(8001, "port on 127.0.0.1; 0: any free port", ge=0, le=65535)
    runs: int = key(len(COLORS), "number of runs, the newest ones", ge=1)
    x: str = key("iter", "horizontal axis", choices=list(X_LABELS))
    metric: str = key("loss", "metric to draw, as in train.tools.plot")


# -----------------------------------------------------------------------------
# files

class Run:
    """The metrics, log and samples of a run's folder."""

    def __init__(self, folder):
        self.folder = folder
        self.stamps = None
        self.records = []

    def update(self):
        """Read the metrics if any file has changed; return whether one has."""
        stamps = [stamp(self.folder / name) for name in FILES]
        if stamps == self.stamps:
            return False
        self.stamps = stamps
        self.records = read_metrics(self.folder / METRICS, MAX_TRAINING_LINES)
        return True

    def summary(self, name, color):
        """Return the numbers and texts of the page."""
        step = next((r for r in reversed(self.records) if "loss" in r), {})
        val_losses = [r["val_loss"] for r in self.records if "val_loss" in r]
        samples = tail(self.folder / SAMPLES)
        headings = re.findall(r"^=== iter .*$", samples, re.MULTILINE)
        start = samples.index(headings[-1]) if headings else 0  # of all samples of that step
        return dict(
            name=name, color=color, changed=max(modified for modified, _ in self.stamps),
            iter=self.records[-1]["iter"] if self.records else None,
            loss=step.get("loss"), tokens_per_sec=step.get("tokens_per_sec"),
            val_loss=val_losses[-1] if val_losses else None,
            best=min((v for v in val_losses if isinstance(v, float)), default=None),
            lines=tail(self.folder / LOG).splitlines()[:-LOG_LINES - 1:-1],
            sample=samples[start:].strip())


def stamp(path):
    """Return (modification time, size) of a file, (0, 0) if it does not exist."""
    with contextlib.suppress(OSError):
        stat = os.stat(path)
        return stat.st_mtime, stat.st_size
    return 0, 0


def tail(path):
    """Return the last TAIL_BYTES of a file as text, "" if it does not exist."""
    with contextlib.suppress(OSError), open(path, "rb") as f:
        f.seek(max(0, os.fstat(f.fileno()).st_size - TAIL_BYTES))
        return f.read().decode("utf-8", "replace")
    return ""


def find_runs(tops):
    """Return the folders of runs in the folders `tops`, the newest last."""
    folders = set()
    for top in tops:
        for folder, subfolders, files in os.walk(top):
            depth = len(Path(folder).relative_to(top).parts)
            subfolders[:] = [s for s in subfolders
                             if depth < MAX_DEPTH and not SKIPPED_FOLDERS.match(s)]
            if {METRICS, LOG} & {*files}:
                folders.add(Path(folder))
    return sorted(folders, key=lambda folder: max(stamp(folder / name)[0] for name in FILES))


# -----------------------------------------------------------------------------
# the server

class Watcher:
    """The content of the page: "/state" (JSON) and pictures (SVG)."""

    def __init__(self, options):
        self.options = options
        self.tops = [Path(folder) for folder in options.folders]
        self.lock = threading.Lock()
        self.runs, self.bodies, self.next_update = {}, {}, 0.0

    def get(self, path):
        """Return the body of a path, of the last update or of a new one."""
        with self.lock:
            start = time.process_time()
            if time.monotonic() >= self.next_update:
                self.next_update = time.monotonic() + MIN_INTERVAL_SECONDS
                self.update()
            if path not in self.bodies:
                self.bodies[path] = self.draw(*PICTURES[path])
            pause = (time.process_time() - start) / CPU_SHARE
            self.next_update = max(self.next_update,
                                   time.monotonic() + min(pause, MAX_INTERVAL_SECONDS))
            return self.bodies[path]

    def update(self):
        """Read the files that have changed, and discard the pictures if any has."""
        runs = {folder: self.runs.get(folder) or Run(folder)
                for folder in sorted(find_runs(self.tops)[-self.options.runs:])}
        changed = [run.update() for run in runs.values()]
        if any(changed) or runs.keys() != self.runs.keys() or not self.bodies:
            self.runs = runs
            state = dict(version=time.time(), colors=COLORS, runs=[
                run.summary(self.name(folder), i) for i, (folder, run) in enumerate(runs.items())])
            self.bodies = {"/state": json.dumps(state).encode()}

    def draw(self, width, max_name):
        """Return the picture of the runs."""
        runs = [(self.name(folder)[-max_name:], run.records) for folder, run in self.runs.items()]
        metric = self.options.metric.removeprefix("val_")
        return loss_svg(runs, self.options.x, metric, width=width).encode()

    def name(self, folder):
        """Return the folder relative to the watched folder, or the name if it is that folder."""
        names = [str(folder.relative_to(top)) for top in self.tops if folder.is_relative_to(top)]
        return next((name for name in names if name != "."), folder.name)


class Handler(BaseHTTPRequestHandler):
    """Answer GET requests of the pages that this server has sent."""
    timeout = 30  # seconds to wait for a request

    def do_GET(self):
        # Other pages in the user's browser may not read runs, even if the name of a server
        # resolves to this machine (DNS rebinding).
        host, origin = self.headers.get("Host", "localhost"), self.headers.get("Origin")
        if host.partition(":")[0] not in ("localhost", "127.0.0.1") or (
                origin is not None and origin.partition("://")[2] != host):
            self.send_error(403)
        elif self.path == "/":
            page = Path(__file__).with_name("watch.html").read_bytes()
            self.reply(page, "text/html; charset=utf-8")
        elif self.path in ("/state", *PICTURES):
            kind = "application/json" if self.path == "/state" else "image/svg+xml"
            self.reply(self.server.watcher.get(self.path), kind)
        else:
            self.send_error(404)

    def reply(self, body, content_type):
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", CONTENT_POLICY)
        with contextlib.suppress(OSError):  # the browser has closed the connection
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *args):
        """Requests are not logged."""


def open_server(options):
    """Return a server that listens on 127.0.0.1. Raises ValueError if the port is not available."""
    try:
        server = ThreadingHTTPServer(("127.0.0.1", options.port), Handler)
    except OSError as error:
        raise ValueError(f"--port {options.port}: {error.strerror}; choose another port, or 0 for "
                         "any free one") from None
    server.watcher = Watcher(options)
    return server


def watch(options):
    """Serve the page until SIGINT or SIGTERM."""
    missing = [folder for folder in options.folders if not os.path.isdir(folder)]
    if missing:
        raise ValueError(f"{', '.join(missing)}: no such folder")
    with open_server(options) as server:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        print(f"Watching {', '.join(options.folders)}: http://127.0.0.1:{server.server_port} "
              "(stop with Ctrl-C)", flush=True)
        if hasattr(os, "nice"):
            os.nice(19)  # training has priority
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


def main(argv=None):
    """Run the command and return the exit code."""
    return run_command(WatchOptions, watch, argv)


if __name__ == "__main__":
    sys.exit(main())
