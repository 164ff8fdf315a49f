"""Show runs on a local web page during training (python -m train.tools.watch out/).

The page has the loss curves, the state, the last log lines and the last sample of the newest runs
in a folder. It asks every two seconds; runs that have not changed are not read again. The server
listens on 127.0.0.1 only. From another machine: ssh -L 8001:127.0.0.1:8001 HOST
"""

import contextlib
import functools
import json
import os
import re
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from train.base.cli import command
from train.base.fields import key
from train.options.loss_svg import COLORS, MAX_LINES, loss_svg, read_metrics

FILES = ("metrics.jsonl", "train.log", "samples.txt")  # of a run; the first one is required
SKIPPED_FOLDERS = re.compile(r"\.|old_\d+$")  # old_N: renamed by --resume never
LOG_LINES = 12
TAIL_BYTES = 1 << 14  # of the log and of the samples
# The last of these in the log of a run, and its state (at a start, "running").
STATES = {"Learning rate: ": "running", "Training complete!": "finished",
          "This run is finished": "finished", "Stopped at iter": "stopped"}


@dataclass
class WatchOptions:
    """Show the loss curves, log lines and samples of runs on a local web page during training."""
    folder: str = key("", "folder of runs", positional=True, metavar="FOLDER")
    port: int = key(8001, "port on 127.0.0.1; 0: any free port", ge=0, le=65535)


def find_runs(top):
    """Return ((folder, (seconds, bytes)), ...) of the newest runs in `top`, as many as COLORS.

    seconds, bytes: the last modification time of FILES and their total size. The order is that of
    the folders' names, so that runs keep their colors. Hidden folders and folders old_N are
    skipped.
    """
    found = []
    for folder, subfolders, files in os.walk(top):
        subfolders[:] = [name for name in subfolders if not SKIPPED_FOLDERS.match(name)]
        if FILES[0] in files:
            with contextlib.suppress(OSError):  # a file was renamed
                stats = [os.stat(os.path.join(folder, name)) for name in FILES if name in files]
                found.append((Path(folder), (max(stat.st_mtime for stat in stats),
                                             sum(stat.st_size for stat in stats))))
    newest = sorted(found, key=lambda run: run[1])[-len(COLORS):]
    return tuple(sorted(newest))


@functools.lru_cache(len(COLORS))
def read_run(folder, stamp):
    """Return (records, values) of the run in `folder`, a Path; records as read_metrics() does.

    stamp: (seconds, bytes) of find_runs(); a run is read again if it differs.
    values: a dict for the page: name; changed, the seconds; step and evaluation, the last training
    and evaluation record, or {}; state; eta, a text; lines, the last lines of the log; sample, the
    last text, or "".
    """
    records = read_metrics(folder / FILES[0], MAX_LINES)
    log, samples = (read_end(folder / name) for name in FILES[1:])

    def last(name):
        return next((r for r in reversed(records) if name in r), {})
    return records, dict(
        name=str(folder), changed=stamp[0], step=last("loss"), evaluation=last("val_loss"),
        state=STATES[max(STATES, key=log.rfind)], lines=log.splitlines()[-LOG_LINES:],
        eta="".join(re.findall(r", eta ((?:\d+ days?, )?[\d:]+)", log)[-1:]),
        sample="".join(samples.rpartition("=== iter ")[1:]).strip())


def read_end(path):
    """Return the last TAIL_BYTES of a file as text, "" if it cannot be read."""
    with contextlib.suppress(OSError), open(path, "rb") as f:
        f.seek(max(0, os.fstat(f.fileno()).st_size - TAIL_BYTES))
        return f.read().decode("utf-8", "replace")
    return ""


@functools.lru_cache(1)
def describe_runs(found):
    """Return {"runs": values of read_run() with a color, "chart": SVG} as JSON; of find_runs()."""
    runs = [read_run(folder, stamp) for folder, stamp in found]
    chart = loss_svg([(values["name"], records) for records, values in runs])
    pages = [values | dict(color=color) for color, (_, values) in zip(COLORS, runs)]
    return json.dumps(dict(runs=pages, chart=chart)).encode()


class Handler(BaseHTTPRequestHandler):
    """Handler of GET requests: "/" for the page, "/state" for the runs in self.server.folder."""

    def handle(self):
        with contextlib.suppress(ConnectionError):  # the browser has closed the connection
            super().handle()

    def do_GET(self):
        if self.path == "/":
            body = Path(__file__).with_name("watch.html").read_bytes()
        elif self.path == "/state":
            body = describe_runs(find_runs(self.server.folder))
        else:
            return self.send_error(404)
        self.send_response(200)
        self.send_header("Content-Type", "text/html" if self.path == "/" else "application/json")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        """Do nothing: requests are not logged."""


def watch(options):
    """Serve the page of the runs in options.folder until SIGINT.

    Raises ValueError if the folder does not exist, OSError if the port is in use.
    """
    if not os.path.isdir(options.folder):
        raise ValueError(f"{options.folder}: no such folder")
    with ThreadingHTTPServer(("127.0.0.1", options.port), Handler) as server:
        server.folder = options.folder
        url = f"http://127.0.0.1:{server.server_port}"
        print(f"Watching {options.folder}: {url} (stop with Ctrl-C)", flush=True)
        server.serve_forever()


main = command(WatchOptions, watch, interrupt_message="stopped")
