"""Rendering of Jinja templates in a child process with limits on time and memory.

The template of a downloaded model is untrusted. Jinja's sandbox runs none of its code, but a single
operation, such as the comparison of nested lists, can take any time or memory and cannot be
interrupted from within the process. The child, `python -m data.render`, stays alive between
requests. A request and a reply are one line of JSON each.
"""

import contextlib
import datetime
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

from train.base.errors import DataError, UserError, require

MAX_CPU_SECONDS = 0.5   # per rendering; usually less than a millisecond
MAX_SECONDS = 20.0      # per rendering, by the clock: a busy machine gives the child little time
MAX_BYTES = 1 << 26     # of the child


# -----------------------------------------------------------------------------
# the process that asks

class Renderer:
    """A child process that renders Jinja templates with limits on time and memory.

    Thread-safe: calls wait for each other. render() starts the process if it is not running. Raises
    SetupError without the package jinja2.
    """

    def __init__(self):
        require("jinja2", "this model's chat template")
        self.lock = threading.Lock()
        self.child = None

    def render(self, template, variables):
        """Return the text that a Jinja template produces, see the function `render`."""
        request = json.dumps([template, variables]).encode() + b"\n"
        with self.lock:
            if self.child is None or self.child.poll() is not None:
                self.child = subprocess.Popen(
                    [sys.executable, "-m", "data.render"], cwd=Path(__file__).parents[1],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                    start_new_session=True)  # Ctrl-C is not for the child
            reply = b""
            try:
                self.child.stdin.write(request)
                self.child.stdin.flush()
                reply = self.child.stdout.readline()
            except BrokenPipeError:  # it has ended
                pass
            finally:
                if not reply.endswith(b"\n"):  # or this process was interrupted
                    self.child.kill()
                    self.child.wait()
        if not reply.endswith(b"\n"):
            raise UserError("the model's chat template fails: it needs more than "
                            f"{MAX_CPU_SECONDS} s of processor time or {MAX_BYTES >> 20} MiB; "
                            "expected another chat_template.jinja, or shorter messages")
        text, problem = json.loads(reply)
        if problem:
            raise DataError(f"the model's chat template fails: {problem}")
        return text


@functools.cache
def renderer(pid):
    """Return the Renderer of this process; pid is os.getpid(), so that a fork gets another one."""
    return Renderer()


def render(template, variables):
    """Return the text that a Jinja template (the source) produces, in a child process with limits.

    variables: {name: value of a JSON type}. Raises DataError if the template fails, UserError if it
    exceeds MAX_CPU_SECONDS, MAX_SECONDS or MAX_BYTES (no limits on Windows), SetupError without the
    package jinja2.
    """
    return renderer(os.getpid()).render(template, variables)


# -----------------------------------------------------------------------------
# the child

@functools.lru_cache
def compile_template(text):
    """Return the sandboxed jinja2.Template of `text`, with the options of `transformers`."""
    import jinja2
    from jinja2 import ext, sandbox

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[ext.loopcontrols])
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals |= dict(
        raise_exception=raise_exception,
        strftime_now=lambda pattern: datetime.datetime.now().strftime(pattern))
    # {% generation %}, an extension of `transformers`, encloses answers and writes nothing.
    return environment.from_string(re.sub(
        r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})",
        lambda m: m[1] + ("endif" if m[2] else "if true") + m[3], text))


def answer(request):
    """Render the template of a request, a JSON text [template, {name: value}].

    Returns [text, `None`], or [`None`, error message] if the template fails. Raises MemoryError,
    which ends the child process.
    """
    text, variables = json.loads(request)
    try:
        return [compile_template(text).render(variables), None]
    except MemoryError:  # ends this process, as if it had been killed at the limit
        raise
    except Exception as error:  # a template can raise any of Python's
        what = str(error) if type(error).__module__.startswith("jinja2") else repr(error)
        return [None, " ".join(what[:200].split())]


def set_timers(cpu_seconds, seconds):
    """Let the system end the process after processor and real seconds (0: never); POSIX only."""
    if hasattr(signal, "setitimer"):  # POSIX
        for name in (signal.SIGPROF, signal.SIGALRM):  # a parent may have ignored them
            signal.signal(name, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        signal.setitimer(signal.ITIMER_REAL, seconds)


def main():
    """Answer each JSON request on standard input with a JSON reply on standard output."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # POSIX
        import resource
        resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
    compile_template("")  # imports jinja2, whose time is not that of the first template
    for request in sys.stdin.buffer:
        set_timers(MAX_CPU_SECONDS, MAX_SECONDS)
        reply = json.dumps(answer(request))
        set_timers(0, 0)
        print(reply, flush=True)


if __name__ == "__main__":
    main()
