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
MAX_BYTES = 1 << 26     # of the child


# -----------------------------------------------------------------------------
# the process that asks

LOCK = threading.Lock()  # threads wait for each other


@functools.lru_cache(1)
def start_child(pid):
    """Start the child process; pid is os.getpid(), so that a fork gets another one."""
    return subprocess.Popen(
        [sys.executable, "-m", "data.render"], cwd=Path(__file__).parents[1],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        start_new_session=True)  # Ctrl-C is not for the child


def render(template, variables):
    """Return the text that a Jinja template (the source) produces, in a child process with limits.

    variables: {name: value of a JSON type}. Raises DataError if the template fails, UserError if it
    exceeds MAX_CPU_SECONDS or MAX_BYTES (no limits on Windows), SetupError without the package
    jinja2. Thread-safe.
    """
    require("jinja2", "this model's chat template")
    request = json.dumps([template, variables]).encode() + b"\n"
    with LOCK:
        if start_child(os.getpid()).poll() is not None:  # it has ended
            start_child.cache_clear()
        child = start_child(os.getpid())
        reply = b""
        try:
            child.stdin.write(request)
            child.stdin.flush()
            reply = child.stdout.readline()
        except BrokenPipeError:  # it has ended
            pass
        finally:
            if not reply.endswith(b"\n"):  # or this process was interrupted
                child.kill()
                child.wait()
    if not reply.endswith(b"\n"):
        raise UserError("the model's chat template fails: it needs more than "
                        f"{MAX_CPU_SECONDS} s of processor time or {MAX_BYTES >> 20} MiB; "
                        "expected another chat_template.jinja, or shorter messages")
    text, problem = json.loads(reply)
    if problem:
        raise DataError(f"the model's chat template fails: {problem}")
    return text


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


def main():
    """Answer each JSON request on standard input with a JSON reply on standard output."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # POSIX
        import resource
        resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
    compile_template("")  # imports jinja2, whose time is not that of the first template
    if hasattr(signal, "SIGPROF"):  # POSIX; a parent may have ignored it
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for request in sys.stdin.buffer:
        if hasattr(signal, "setitimer"):  # POSIX; the system ends this process
            signal.setitimer(signal.ITIMER_PROF, MAX_CPU_SECONDS)
        print(json.dumps(answer(request)), flush=True)


if __name__ == "__main__":
    main()
