"""Show runs on a local web page during training (python -m train.tools.watch out/).

The page has the loss curves, the state, the last log lines and the last sample of the newest runs
in a folder. Files that have changed are read again, every two seconds at most. The server listens
on 127.0.0.1 only. From another machine: ssh -L 8001:127.0.0.1:8001 HOST
"""

import contextlib
import functools
import json
import os
import re
import signal
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from train.base.cli import command
from train.base.fields import key
from train.options.loss_svg import COLORS, MAX_LINES, loss_svg, read_metrics

METRICS = "metrics.jsonl"
LOG = "train.log"
SAMPLES = "samples.txt"
# The files of a run that are read.
FILES = (METRICS, LOG, SAMPLES, "training_args.json")  # the last one is written at the start
MAX_DEPTH = 3              # of folders below the watched folder
SKIPPED_FOLDERS = re.compile(r"\.|old_\d+$")  # old_N: renamed by --resume never
LOG_LINES = 12
TAIL_BYTES = 1 << 14       # of the log and of the samples
MIN_INTERVAL_SECONDS = 2.0  # between two updates
STALE_SECONDS = 120.0      # without a change
# The last of these in the log of a run, and its state (none at a start).
ENDS = {"Learning rate: ": None, "Training complete!": "finished",
        "This run is finished": "finished", "Stopped at iter": "stopped"}
TYPES = {"/": "text/html; charset=utf-8", "/state": "application/json", "/chart": "image/svg+xml"}
CONTENT_POLICY = ("default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
                  "connect-src 'self'; img-src data:; base-uri 'none'; frame-ancestors 'none'")


@dataclass
class WatchOptions:
    """Show the loss curves, log lines and samples of runs on a local web page during training."""
    folder: str = key("", "folder of runs", positional=True, metavar="FOLDER")
    port: int = key(8001, "port on 127.0.0.1; 0: any free port", ge=0, le=65535)
    runs: int = key(len(COLORS), "number of runs, the newest ones", ge=1)


# -----------------------------------------------------------------------------
# files

def read_run(folder, stamps):
    """Return (records, values) of the run in `folder`, a Path; records as read_metrics() does.

    stamps: ((modification time, size), ...) of the files of the run, at least one.
    values: a dict for the page: name; started and changed, the first and last modification time;
    step and evaluation, the last training and evaluation record, or {}; end: "finished", "stopped"
    or `None`; eta, a text; lines, the last lines of the log; sample, the last text, or "".
    """
    is_link = (folder / METRICS).is_symlink()  # perhaps to a file that is not of a run
    records = [] if is_link else read_metrics(folder / METRICS, MAX_LINES)
    def last(name):
        return next((r for r in reversed(records) if name in r), {})
    log = tail(folder / LOG)
    sample = "".join(tail(folder / SAMPLES).rpartition("=== iter ")[1:]).strip()
    return records, dict(
        name=str(folder), started=min(stamps)[0], changed=max(stamps)[0], step=last("loss"),
        evaluation=last("val_loss"), end=ENDS[max(ENDS, key=log.rfind)], sample=sample,
        eta="".join(re.findall(r", eta (\S+)", log)[-1:]), lines=log.splitlines()[-LOG_LINES:])


def tail(path):
    """Return the last TAIL_BYTES of a regular file as text; "" for links and everything else."""
    with contextlib.suppress(OSError):
        # A named pipe would block, a link may lead out of the run's folder.
        if path.is_file() and not path.is_symlink():
            with open(path, "rb") as f:
                f.seek(max(0, os.fstat(f.fileno()).st_size - TAIL_BYTES))
                return f.read(TAIL_BYTES).decode("utf-8", "replace")
    return ""


def find_runs(top, n):
    """Return {folder: ((modification time, size), ...)} of the `n` newest runs, the newest last.

    A run is a folder (a Path) with metrics.jsonl or train.log: `top`, or up to MAX_DEPTH levels
    below. Hidden folders and folders old_N are skipped. The tuple has a pair for each file in FILES
    that exists. The newest run changed last.
    """
    found = {}
    for folder, subfolders, files in os.walk(top):
        is_last = len(Path(folder).relative_to(top).parts) == MAX_DEPTH
        subfolders[:] = [s for s in subfolders if not (is_last or SKIPPED_FOLDERS.match(s))]
        if METRICS in files or LOG in files:
            with contextlib.suppress(OSError):  # a file was renamed
                stats = [os.stat(os.path.join(folder, name)) for name in FILES if name in files]
                found[Path(folder)] = tuple((stat.st_mtime, stat.st_size) for stat in stats)
    return dict(sorted(found.items(), key=lambda item: max(item[1]))[-n:])


# -----------------------------------------------------------------------------
# the server

class Server(ThreadingHTTPServer):
    """An HTTP server on 127.0.0.1 for the runs of WatchOptions: a page, /state and /chart."""

    def __init__(self, options):
        super().__init__(("127.0.0.1", options.port), Handler)
        self.options = options
        self.lock = threading.Lock()
        self.next_update = 0.0
        self.read_run = functools.lru_cache(options.runs)(read_run)  # again if a file has changed
        self.pages = ""
        self.bodies = {"/": Path(__file__).with_name("watch.html").read_bytes()}

    def get(self, path):
        """Return the bytes of "/", "/state" or "/chart", renewed after two seconds; thread-safe."""
        with self.lock:
            if time.monotonic() >= self.next_update:
                self.update()
                self.next_update = time.monotonic() + MIN_INTERVAL_SECONDS
            return self.bodies[path]

    def update(self):
        """Renew /state and /chart if a page would show something else; needs self.lock.

        The run that started last comes first. A run also changes if it becomes "stale".
        """
        found = find_runs(self.options.folder, self.options.runs)
        runs = [self.read_run(folder, stamps) for folder, stamps in found.items()]
        runs.sort(key=lambda run: run[1]["started"], reverse=True)
        now = time.time()
        for i, (_, page) in enumerate(runs):
            page["color"] = COLORS[i % len(COLORS)]
            stale = now > page["changed"] + STALE_SECONDS
            page["state"] = page["end"] or ("stale" if stale else "running")
        pages = json.dumps([page for _, page in runs])
        if pages != self.pages:
            self.pages = pages
            curves = [(page["name"], records) for records, page in runs]
            self.bodies["/state"] = f'{{"version": {now}, "runs": {pages}}}'.encode()
            self.bodies["/chart"] = loss_svg(curves).encode()


class Handler(BaseHTTPRequestHandler):
    """Handler of GET requests to a Server: 403 for other pages or hosts, 404 for other paths."""
    timeout = 30  # seconds to wait for a request

    def handle(self):
        with contextlib.suppress(ConnectionError):  # the browser has closed the connection
            super().handle()

    def do_GET(self):
        # Other pages in the user's browser may not read runs, even if the name of a server
        # resolves to this machine (DNS rebinding).
        host = self.headers.get("Host", "localhost")
        origin = self.headers.get("Origin", f"http://{host}")
        if host.partition(":")[0] not in ("localhost", "127.0.0.1") or origin != f"http://{host}":
            self.send_error(403)
        elif self.path not in TYPES:
            self.send_error(404)
        else:
            body = self.server.get(self.path)
            self.send_response(200)
            self.send_header("Content-Type", TYPES[self.path])
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Security-Policy", CONTENT_POLICY)
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *args):
        """Do nothing: requests are not logged."""


def watch(options):
    """Serve the page of the runs in options.folder until SIGINT or SIGTERM, then return.

    Raises ValueError if the folder does not exist, OSError if the port is in use.
    """
    if not os.path.isdir(options.folder):
        raise ValueError(f"{options.folder}: no such folder")
    with Server(options) as server:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        url = f"http://127.0.0.1:{server.server_port}"
        print(f"Watching {options.folder}: {url} (stop with Ctrl-C)", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


main = command(WatchOptions, watch)
