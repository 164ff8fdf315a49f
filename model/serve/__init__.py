"""A model behind OpenAI's API and a page: python -m model.serve --ckpt out/ckpt.pt

POST /v1/completions and, where the checkpoint learned chats, /v1/chat/completions, both also as a
stream; GET /v1/models, /health, /metrics (Prometheus), and / for the page (serve.html).
"""

import argparse
import os
import signal
import socket
from pathlib import Path

from model.serve.site import is_local
from train.base.cli import run_command

KEY = "IRONGPT_API_KEY"  # of the environment


def parser():
    from model.sample.load import (
        add_load_options,  # with torch, which train/tools/watch.py does without
    )
    p = argparse.ArgumentParser(prog="python -m model.serve", description=__doc__.split("\n")[0])
    add = p.add_argument
    add_load_options(p)
    add("--name", help="of the model, for clients (default: that of the checkpoint's folder)")
    add("--host", default="127.0.0.1", help="address to listen on: this machine only (default: "
        "%(default)s); 0.0.0.0: whoever can reach it and has the key")
    keys = p.add_mutually_exclusive_group()
    keys.add_argument("--api_key", default=os.environ.get(KEY), help="what clients must know; "
                      f"better as {KEY} in the environment, which other users do not see")
    keys.add_argument("--no_api_key", action="store_true", help="ask nobody, whatever --host is")
    add("--port", type=int, default=8000, help="0: any free one (default: %(default)s)")
    add("--slots", type=int, default=16, help="texts written at once (default: %(default)s)")
    add("--queue", type=int, default=256, help="requests that may wait (default: %(default)s)")
    add("--max_tokens", type=int, default=1024, help="the most that a request may ask for "
        "(default: %(default)s)")
    add("--timeout", type=float, default=300, help="seconds for a request (default: %(default)s)")
    return p


def check_args(a):
    """ValueError with all that is wrong with the arguments."""
    limits = (("slots", 1, 1024), ("queue", 1, 100_000), ("max_tokens", 1, 10**6),
              ("timeout", 0.1, 86_400), ("port", 0, 65_535))
    wrong = [f"--{name}: expected {low} to {high}, got {getattr(a, name)}"
             for name, low, high in limits if not low <= getattr(a, name) <= high]
    if wrong:
        raise ValueError("\n".join(wrong))


def listen(host, port):
    """A socket that waits for connections. ValueError where it cannot."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=128)
    except (OSError, UnicodeError, OverflowError) as error:  # the last: of the port
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"--host {host} --port {port}: cannot listen there: {reason}; "
                         "take another --port, or 0 for any free one") from None


def key_of(args, listening):
    """What clients must know, or None. ValueError where others could ask without it."""
    if args.no_api_key:
        return None
    if not args.api_key and not is_local(listening):
        raise ValueError(f"--host {args.host} opens this server to others: give them --api_key (or "
                         f"{KEY} in the environment), or answer anybody with --no_api_key")
    return args.api_key or None


def stop_signals():
    """A list that SIGINT, SIGTERM and SIGHUP add their number to. A second one ends the process at
    once, with 128 + its number. Ignored ones (nohup) stay ignored."""
    stopped = []

    def handle(signum, frame):
        if stopped:
            os._exit(128 + signum)
        os.write(2, b"\nfinishing what has begun; again: at once\n")
        stopped.append(signum)
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handle)
    return stopped


def run(listening, args):
    """Load the model and answer until a signal comes. Raises ValueError or UserError."""
    from model.sample.load import load_for_decoding
    from model.serve.engine import Engine
    from model.serve.server import Server
    key, (host, port) = key_of(args, listening), listening.getsockname()[:2]
    model, tokenizer, _ = load_for_decoding(args)
    template, ends = getattr(model, "template", None), ()
    if template:
        ends = template.end_ids(tokenizer)
    try:
        engine = Engine(model, tokenizer, args.slots, args.queue, args.max_tokens, args.timeout,
                        ends)
    except RuntimeError as error:  # no memory
        raise ValueError(f"--slots {args.slots}: no room for their keys and values: {error}; take "
                         "fewer") from None
    name = args.name or Path(args.ckpt).resolve().parent.name
    server = Server(listening, engine, name, template, args.host, key)
    stopped = stop_signals()
    where = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    print(f"Model {name!r} at {where} (a page) and {where}/v1 (OpenAI's API). Ctrl-C ends it.",
          flush=True)
    server.serve(stopped)


def serve(args):
    """Serve as the command line asks, until a signal."""
    check_args(args)
    with listen(args.host, args.port) as listening:
        run(listening, args)


def main(argv=None):
    """The command line; the exit code."""
    return run_command(parser(), serve, argv)
