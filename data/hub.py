"""Downloads: models and data sets of the Hugging Face hub, and small files by URL.

The hub is accessed by the optional package huggingface_hub, which caches files, resumes downloads
and uses the access token. HF_ENDPOINT names a mirror.
"""

import hashlib
import os
import re
from pathlib import Path

from train.base.errors import DataError, require

HUB = "https://huggingface.co"
# Anyone on the way can change plain http.
TRUSTED_URL = r"https://|http://(localhost|127(\.\d+){3})(:\d+)?(/|$)"
CONFIG_FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
                "chat_template.jinja"]
MAX_JSON_BYTES = 1 << 27
WEIGHT_FILES = ["model*.safetensors", "model.safetensors.index.json"]


def model_name(path):
    """Return the name of a model for people: OWNER/NAME of the hub, or the folder's."""
    if path.startswith("hf:"):
        return path.removeprefix("hf:")
    path = Path(path).expanduser().resolve()
    return path.name if path.is_dir() else path.parent.name


def local_folder(name, weights=True):
    """Return the path `name`; for hf:OWNER/NAME, the cached folder of that model, downloaded if
    necessary (without `weights`: configuration and tokenizer only). Raises DataError."""
    if not name.startswith("hf:"):
        return os.path.expanduser(name)
    if not re.fullmatch(r"hf:[\w-][\w.-]*(/[\w-][\w.-]*)?", name):
        raise DataError(f"{name}: expected hf:OWNER/NAME, as on {HUB}")
    patterns = CONFIG_FILES + WEIGHT_FILES * weights
    folder = download(name, "snapshot_download", repo_id=name[3:], allow_patterns=patterns)
    for path in Path(folder).glob("*.json"):
        if not looks_like_json(path):
            for file in {os.path.realpath(path), str(path)}:
                os.remove(file)
            raise DataError(f"{name}: {path.name} is not the JSON of a model; it is deleted. Check "
                            "for a sign-in page of the network, and the mirror; the same command "
                            "downloads it again")
    if not os.path.exists(os.path.join(folder, "config.json")):
        raise DataError(f"{name}: the repository has no config.json: it is no model")
    return folder


def looks_like_json(path):
    """Return whether a file begins like a JSON object and has an ordinary size: a mirror can answer
    with a page of HTML."""
    with open(path, "rb") as f:
        return f.read(64).lstrip()[:1] == b"{" and path.stat().st_size <= MAX_JSON_BYTES


def download(name, function, **arguments):
    """Return the result of a download function of huggingface_hub. Raises DataError for `name`."""
    hub = require("huggingface_hub", name)
    endpoint = os.environ.get("HF_ENDPOINT") or HUB
    if not re.match(TRUSTED_URL, endpoint):
        raise DataError(f"{endpoint}: expected the https:// address of a mirror of {HUB}")
    try:
        return getattr(hub, function)(endpoint=endpoint.rstrip("/"), **arguments)
    except Exception as error:  # many types, of the network and of the hub
        reason, *_ = str(error).strip().splitlines() or [""]
        raise DataError(f"{name}: could not be downloaded ({type(error).__name__}: {reason:.200}). "
                        "The same command resumes the download; HF_ENDPOINT names a mirror. "
                        "Without a network, copy the files and give their path") from None


def fetch_file(url, sha256):
    """Return the content (bytes) of a small file after checking the sha256. Raises OSError."""
    import requests  # a dependency of tiktoken; slow to import
    reply = requests.get(url, timeout=20)
    reply.raise_for_status()
    if hashlib.sha256(reply.content).hexdigest() != sha256:
        raise OSError("the content has another sha256")
    return reply.content
