"""Output of a long run: the console, files that grow by lines, and formatting of numbers.

Failures of the output never stop the program: a closed pipe or a full disk costs that output only.
"""

import os
import threading
import time
from contextlib import suppress

from train.base.errors import warn_stderr
from train.base.files import open_no_follow

YELLOW = "\x1b[33m"
RESET = "\x1b[0m"
CLEAR_LINE = "\r\x1b[K"


class Console:
    """A text stream with lines and, on a terminal, one live line below. `used_at` is the time of
    the last output."""

    def __init__(self, stream):
        self.live = bool(stream and stream.isatty()) and os.environ.get("TERM") != "dumb"
        self.stream = stream
        self.live_line = ""
        self.used_at = time.monotonic()
        self.lock = threading.Lock()
        self.color = self.live and not os.environ.get("NO_COLOR")
        self.encoding = getattr(stream, "encoding", None) or "utf-8"
        self.unicode = self.encoding.lower().startswith("utf")

    def show(self, line=None, live=None, heartbeat=False):
        """Print `line` above the live line, and replace the live line by `live`; "" clears it.
        heartbeat: do not change used_at."""
        with self.lock:
            self.used_at = self.used_at if heartbeat else time.monotonic()
            text = CLEAR_LINE if self.live_line or live else ""
            text += "" if line is None else f"{line}\n"
            self.live_line = self.live_line if live is None else live
            text = (text + self.live_line).encode(self.encoding, "replace").decode(self.encoding)
            try:
                if self.stream is not None:
                    self.stream.write(text)
                    self.stream.flush()
            except (OSError, ValueError):
                with suppress(OSError, ValueError):  # other code may print to the same stream
                    os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
                self.stream = None


class LineFile:
    """A file that grows by lines, each written at once. Warns at the first failure. A link at
    `path` is replaced by a new file."""

    def __init__(self, path):
        self.path = path
        self.file = None
        self.incomplete = False  # the last line
        self.warned = False

    def open(self):
        if os.path.islink(self.path):
            warn_stderr(f"warning: {self.path} was a link to {os.readlink(self.path)}; a new file "
                        "replaces the link")
            os.unlink(self.path)
        return open_no_follow(self.path, "ab")

    def write(self, line):
        data = (b"\n" if self.incomplete else b"") + line.encode("utf-8", "replace")
        try:
            self.file = self.file or self.open()
            self.incomplete = self.file.write(data) < len(data)
            if self.incomplete:
                raise OSError("the disk is full")
        except OSError as error:
            if not self.warned:
                warn_stderr(f"warning: {self.path} cannot be written, the run continues: {error}")
            self.warned = True

    def close(self):
        with suppress(OSError, AttributeError):  # AttributeError: never opened
            self.file.close()
        self.file = None


def compact(n):
    """Return a number with three digits and a unit: 950.2 -> 950, 12345 -> 12.3k, ..."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(n) >= size * 0.9995:  # would be rounded to 1000 of the smaller unit
            return f"{n / size:.3g}{unit}"
    return f"{n:.3g}"


def duration(seconds):
    """Return seconds as 1:02:05 or 2d 3:00:00."""
    s = max(0, round(seconds))
    days = f"{s // 86400}d " if s >= 86400 else ""
    return f"{days}{s // 3600 % 24}:{s // 60 % 60:02d}:{s % 60:02d}"
