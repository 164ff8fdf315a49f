"""Output of a long run: the console, files to which lines are appended, and formatting of numbers.

Failures of the output never stop the program: a closed pipe or a full disk costs that output only.
"""

import os
import threading
from contextlib import suppress
from datetime import timedelta

from train.base.errors import warn_stderr
from train.base.files import open_no_follow

YELLOW = "\x1b[33m"
RESET = "\x1b[0m"
CLEAR_LINE = "\r\x1b[K"


class Console:
    """A console for lines of text and, on a terminal, one live line below them, e.g. the progress.

    stream: e.g. sys.stdout; `None` or closed for no output. Attributes: live, whether a live line
    is possible; color, whether to use colors (not with NO_COLOR).
    """

    def __init__(self, stream):
        stream = None if getattr(stream, "closed", False) else stream
        is_terminal = getattr(stream, "isatty", lambda: False)()
        self.live = is_terminal and os.environ.get("TERM") != "dumb"
        self.color = self.live and not os.environ.get("NO_COLOR")
        self.stream = stream or open(os.devnull, "w")
        with suppress(AttributeError):  # characters that its encoding lacks become "?"
            self.stream.reconfigure(errors="replace")
        self.live_line = ""
        self.lock = threading.Lock()

    def show(self, line=None, live=None):
        """Print `line` above the live line, and replace the live line by `live`; never raises.

        line: `None` prints nothing. live: `None` keeps the live line, "" clears it; a text requires
        self.live.
        """
        with self.lock:
            clear = CLEAR_LINE if self.live_line or live else ""
            self.live_line = self.live_line if live is None else live
            try:
                self.stream.write(clear + ("" if line is None else f"{line}\n") + self.live_line)
                self.stream.flush()
            except (OSError, ValueError):
                # Other code may print to the same stream.
                with suppress(OSError, ValueError), open(os.devnull, "w") as null:
                    os.dup2(null.fileno(), self.stream.fileno())


class LineFile:
    """A text file to which write(line) appends a line at once; failures give one warning only."""

    def __init__(self, path):
        self.path = path
        self.file = None
        self.incomplete = False  # the last line
        self.warned = False

    def write(self, line):
        data = (b"\n" if self.incomplete else b"") + line.encode("utf-8", "replace") + b"\n"
        try:
            folder = os.path.dirname(self.path)
            # Deleted, or moved with its folder, which a save has created again.
            if self.file and (os.fstat(self.file.fileno()).st_nlink == 0
                              or os.path.isdir(folder) and not os.path.exists(self.path)):
                self.close()
            self.file = self.file or open_no_follow(self.path, "ab")
            self.incomplete = self.file.write(data) < len(data)  # on a full disk
        except OSError as error:
            if not self.warned:
                warn_stderr(f"warning: {self.path} cannot be written, the run continues: {error}")
            self.warned = True
            self.close()  # opened again: a stale handle of a network file system stays stale

    def close(self):
        with suppress(OSError, AttributeError):  # AttributeError: never opened
            self.file.close()
        self.file = None


def compact(n):
    """Return a number as text with three significant digits and k, M, B or T, e.g. 12.3k."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(n) >= size * 0.9995:  # would be rounded to 1000 of the smaller unit
            return f"{n / size:.3g}{unit}"
    return f"{n:.3g}"


def duration(seconds):
    """Return seconds as hours:minutes:seconds, e.g. 1:02:05 or "2 days, 3:00:00"."""
    return str(timedelta(seconds=round(max(0.0, min(seconds, 1e13)))))  # the limit of a timedelta
