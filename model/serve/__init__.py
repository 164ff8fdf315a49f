"""OpenAI-compatible server and a page: python -m model.serve --ckpt out/ckpt.pt

POST /v1/completions and, for chat models, /v1/chat/completions, also as a stream; GET /v1/models,
/health, /metrics (Prometheus), and / for the page (serve.html).
"""

import argparse
import ipaddress
import os
import signal
import socket
from pathlib import Path

from train.base.cli import run_command
from train.base.errors import require

API_KEY_VARIABLE = "IRONGPT_API_KEY"  # of the environment
LIMITS = dict(slots=(1, 1024), queue=(1, 100_000), max_tokens=(1, 10**6), timeout=(0.1, 86_400),
              port=(0, 65_535))


def create_parser():
    from model.sample.load import add_load_options  # imports torch
    p = argparse.ArgumentParser(prog="python -m model.serve", description=__doc__.split("\n")[0])
    add = p.add_argument
    add_load_options(p)
    add("--name", help="model name for clients (default: the name of the checkpoint's folder)")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this "
        "machine only); 0.0.0.0: all interfaces, which requires a key")
    keys = p.add_mutually_exclusive_group()
    keys.add_argument("--api_key", default=os.environ.get(API_KEY_VARIABLE), help="key that "
                      f"clients must send; {API_KEY_VARIABLE} in the environment is safer, because "
                      "other users can see command lines")
    keys.add_argument("--no_api_key", action="store_true", help="accept requests without a key on "
                      "any --host")
    add("--allow_origin", action="append", default=[], metavar="URL", help="web page that may send "
        "requests from a browser, e.g. https://chat.example (repeatable; *: any)")
    add("--port", type=int, default=8000, help="0: any free port (default: %(default)s)")
    add("--slots", type=int, default=16, help="texts per batch (default: %(default)s)")
    add("--queue", type=int, default=256, help="waiting requests (default: %(default)s)")
    add("--max_tokens", type=int, default=1024, help="maximum of a request (default: %(default)s)")
    add("--timeout", type=float, default=300, help="seconds per request (default: %(default)s)")
    return p


def check_args(args):
    """Raise ValueError with all invalid arguments."""
    problems = [f"--{name}: expected {low} to {high}, got {getattr(args, name)}"
                for name, (low, high) in LIMITS.items() if not low <= getattr(args, name) <= high]
    if problems:
        raise ValueError("\n".join(problems))


def listen(host, port):
    """Return a listening socket. Raises ValueError."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=128)
    except (OSError, UnicodeError, OverflowError) as error:  # OverflowError: port
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"--host {host} --port {port}: cannot listen: {reason}; choose another "
                         "--port, or 0 for any free one") from None


def is_loopback(listening):
    """Return whether a socket is reachable from this machine only."""
    return ipaddress.ip_address(listening.getsockname()[0]).is_loopback


def choose_key(args, listening):
    """Return the key that clients must send, or None. Raises ValueError if others could send
    requests without one."""
    if args.no_api_key:
        return None
    if not args.api_key and not is_loopback(listening):
        raise ValueError(f"--host {args.host} makes this server reachable for others: set "
                         f"--api_key or {API_KEY_VARIABLE} in the environment, or accept requests "
                         "from anybody with --no_api_key")
    return args.api_key or None


def stop_signals():
    """Return a list to which SIGINT, SIGTERM and SIGHUP append their number. A second signal exits
    immediately with code 128 + number. Signals that are ignored (nohup) stay ignored."""
    received = []

    def handle(signum, frame):
        if received:
            os._exit(128 + signum)
        os.write(2, b"\nfinishing active requests; press again to quit now\n")
        received.append(signum)
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handle)
    return received


def create_engine(args):
    """Return (engine, chat template or None) of the checkpoint. Raises ValueError or UserError."""
    from model.sample.load import load_for_decoding
    from model.serve.engine import Engine
    model, tokenizer, _ = load_for_decoding(args)
    template, end_tokens = getattr(model, "template", None), ()
    if template:
        end_tokens = template.end_ids(tokenizer)
    try:
        return Engine(model, tokenizer, args.slots, args.queue, args.max_tokens, args.timeout,
                      end_tokens), template
    except RuntimeError as error:  # out of memory
        raise ValueError(f"--slots {args.slots}: not enough memory for the key-value cache: "
                         f"{error}; use fewer slots") from None


def serve(args):
    """Load the model and answer requests until a signal arrives."""
    check_args(args)
    require("starlette", "model.serve")
    require("uvicorn", "model.serve")
    from model.serve.server import Server
    with listen(args.host, args.port) as listening:
        key, (host, port) = choose_key(args, listening), listening.getsockname()[:2]
        engine, template = create_engine(args)
        name = args.name or Path(args.ckpt).resolve().parent.name
        server = Server(listening, engine, name, template, args.host, key, args.allow_origin)
        received = stop_signals()
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        print(f"Model {name!r} at {url} (a page) and {url}/v1 (OpenAI's API). Ctrl-C stops the "
              "server.", flush=True)
        server.serve(received)


def main(argv=None):
    """Run the command; return its exit code."""
    return run_command(create_parser(), serve, argv)
