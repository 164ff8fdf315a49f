"""OpenAI-compatible server and a web page: python -m model.serve --ckpt out/ckpt.pt.

POST /v1/completions and, for chat models, /v1/chat/completions, also as a stream; GET /v1/models,
/health, and / for the page (serve.html).
"""

import ipaddress
import os
import socket
from dataclasses import dataclass

from data.hub import model_name
from model.core.generate import find_ends
from model.core.packed import replace_linear_layers
from model.sample import LoadOptions, load_text_model
from train.base.cli import command
from train.base.errors import require
from train.base.fields import key

API_KEY_VARIABLE = "IRONGPT_API_KEY"  # of the environment


@dataclass
class ServeOptions(LoadOptions):
    """Serve a checkpoint with OpenAI's API and a web page."""
    name: str | None = key(None, "model name for clients (default: the checkpoint's folder)")
    host: str = key("127.0.0.1", "address to listen on: this machine only; 0.0.0.0: all "
                    "interfaces, which requires a key", metavar="ADDRESS")
    port: int = key(8000, "0: any free port", ge=0, le=65_535)
    api_key: str | None = key(None, "key that clients must send (default: IRONGPT_API_KEY in the "
                              "environment, which others cannot see)", metavar="KEY", text=True)
    cors: list[str] = key([], "web page that may send requests, e.g. https://chat.example "
                          "(repeatable; *: any)", metavar="ORIGIN")
    slots: int = key(16, "texts per batch", ge=1, le=1024)
    max_tokens: int = key(1024, "maximum number of new tokens per request", ge=1, le=10**6)
    timeout: float = key(300.0, "seconds per request", ge=0.1, le=86_400)


def serve(options):
    """Run the command: answer HTTP requests until SIGINT or SIGTERM; active ones are finished.

    Raises OSError if the address cannot be used, ValueError or UserError for the model, an invalid
    key, a missing one (other machines can reach the address) or a missing package.
    """
    require("starlette", "model.serve")
    require("uvicorn", "model.serve")
    from model.serve.engine import Engine
    from model.serve.server import Server
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with socket.create_server((options.host, options.port), family=family) as listening:
        address, port = listening.getsockname()[:2]
        api_key = options.api_key
        if api_key is None:
            api_key = os.environ.get(API_KEY_VARIABLE) or None
        if api_key == "" or api_key and not (api_key.isprintable() and api_key == api_key.strip()):
            raise ValueError("--api_key: expected printable characters, without blanks around them")
        if not (api_key or ipaddress.ip_address(address).is_loopback):
            raise ValueError(f"--host {options.host} makes this server reachable for others: set "
                             f"--api_key, or {API_KEY_VARIABLE} in the environment")
        model, tokenizer, _ = load_text_model(options)
        replace_linear_layers(model)  # they decode faster
        template = getattr(model, "template", None)
        end_tokens = find_ends(model, tokenizer)
        end_tokens += template.end_ids(tokenizer) if template else []
        engine = Engine(model, tokenizer, options.slots, max_tokens=options.max_tokens,
                        timeout=options.timeout, end_tokens=end_tokens)
        name = options.name or model_name(options.ckpt)
        server = Server(engine, name, template, options.host, api_key, options.cors)
        url = f"http://{f'[{address}]' if ':' in address else address}:{port}"
        print(f"Model {name!r} at {url} (a page) and {url}/v1 (OpenAI's API). Ctrl-C stops the "
              "server.", flush=True)
        try:
            server.run([listening])
        finally:
            engine.close()


main = command(ServeOptions, serve)
