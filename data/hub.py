"""Downloads of models and data sets from the Hugging Face hub.

The hub is accessed by the optional package huggingface_hub, which caches files and uses the user's
access token. The environment variable HF_ENDPOINT is the address of a mirror.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from train.base.errors import DataError, UserError, require

HUB = "https://huggingface.co"
# Anyone on the way can change plain http.
TRUSTED_URL = r"https://|http://(localhost|127(\.\d+){3})(:\d+)?(/|$)"
CONFIG_FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
                "special_tokens_map.json", "chat_template.jinja", "model.safetensors.index.json"]
WEIGHT_FILES = ["model*.safetensors"]
# What must be in these files: a key, or a text.
CONTENT = {"config.json": "model_type", "tokenizer.json": "model",
           "model.safetensors.index.json": "weight_map", "chat_template.jinja": "{{"}
MAX_JSON_BYTES = 1 << 27
MAX_FILE_BYTES = 100 << 30  # twice what the hub sends by HTTP
MAX_SECONDS = 24 * 3600
MAX_JSON_SECONDS = 600


def model_name(path):
    """Return the display name of a model: OWNER/NAME of hf:OWNER/NAME, or the folder's name.

    path: hf:OWNER/NAME, the model's folder, or a file in this folder.
    """
    if path.startswith("hf:"):
        return path.removeprefix("hf:")
    path = Path(path).expanduser().resolve()
    return path.name if path.is_dir() else path.parent.name


def local_folder(name, weights=True):
    """Return the local path of a model; hf:OWNER/NAME is downloaded into huggingface_hub's cache.

    name: hf:OWNER/NAME, or a local path, returned with ~ expanded; it may be missing, or a file.
    weights: False downloads configuration and tokenizer only. Only missing files are downloaded.
    Errors, only for hf:...: DataError for a failed download and invalid files; SetupError without
    huggingface_hub or, for weights, safetensors.
    """
    if not name.startswith("hf:"):
        return os.path.expanduser(name)
    folder = download_files(name, CONFIG_FILES, max_bytes=MAX_JSON_BYTES,
                            max_seconds=MAX_JSON_SECONDS)
    return download_files(name, WEIGHT_FILES) if weights else folder


def download_files(name, patterns, **limits):
    """Download a model's files that match `patterns`; return the path of their folder.

    An invalid file is deleted. limits: arguments of download(). Raises DataError for an invalid
    file, if the folder has no files, and as download().
    """
    folder = download(name, "snapshot_download", repo_id=name.removeprefix("hf:"),
                      allow_patterns=patterns, **limits)
    if not any(Path(folder).glob("*")):
        raise DataError(f"{name}: the repository has no files of a model")
    for path in (path for pattern in patterns for path in Path(folder).glob(pattern)):
        try:
            check_file(path, name)
        except (OSError, MemoryError, UserError):
            raise
        except Exception:
            path.resolve().unlink()
            path.unlink(missing_ok=True)  # the link to it, if the cache has links
            raise DataError(f"{name}: deleted {path.name}: expected a file of a model. Check the "
                            "network and the mirror, and try again") from None
    return folder


def check_file(path, name):
    """Raise an exception of any type if a model's file is damaged, or e.g. the page of a proxy."""
    if path.suffix == ".safetensors":
        require("safetensors", name).safe_open(path, "np")  # compares sizes
        return
    text = path.read_text("utf-8")
    content = json.loads(text).keys() if path.suffix == ".json" else text
    if path.name in CONTENT and CONTENT[path.name] not in content:
        raise ValueError


def download(name, function, max_bytes=MAX_FILE_BYTES, max_seconds=MAX_SECONDS, **arguments):
    """Call huggingface_hub.FUNCTION(**arguments) in a child process and return the path, a text.

    arguments: values of JSON types, with repo_id and without endpoint. name: for error messages.
    Raises DataError if the download fails, takes more than max_seconds, or has a file of more than
    max_bytes, or if HF_ENDPOINT is not an https address (or http to localhost); SetupError without
    the package.
    """
    require("huggingface_hub", name)
    endpoint = (os.environ.get("HF_ENDPOINT") or HUB).rstrip("/")
    if not re.match(TRUSTED_URL, endpoint):
        raise DataError(f"{endpoint}: expected the https:// address of a mirror of {HUB}")
    request = json.dumps([function, max_bytes, arguments | dict(endpoint=endpoint)])
    # In a child process, which can be ended: huggingface_hub limits the time between two bytes
    # only, and a mirror may send without end.
    try:
        done = subprocess.run([sys.executable, "-m", "data.hub", request], timeout=max_seconds,
                              cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True)
        if done.returncode == 0:
            return done.stdout.removesuffix("\n")
        reason = done.stdout.strip() or "it was killed"
    except subprocess.TimeoutExpired:
        reason = f"it took more than {max_seconds:,} seconds"
    raise DataError(f"{name}: could not be downloaded ({reason}). The same command downloads "
                    "the missing files; HF_ENDPOINT names a mirror. Without a network, copy the "
                    "files and give their path")


def run_download(function, max_bytes, arguments):
    """Call huggingface_hub.FUNCTION(**arguments) in the child process, and print the returned path.

    A file of more than max_bytes is an error (not on Windows). After an error, print the error and
    exit with code 1.
    """
    import huggingface_hub
    with contextlib.suppress(ImportError, ValueError):  # Windows; a lower limit of the user
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, max_bytes))
    try:
        print(getattr(huggingface_hub, function)(**arguments))
    except BaseException as error:  # many types, of the network and of the hub; Ctrl-C
        reason, *_ = str(error).strip().splitlines() or [""]
        print(f"{type(error).__name__}: {reason:.200}", flush=True)
        os._exit(1)  # without waiting for the other files


if __name__ == "__main__":
    run_download(*json.loads(sys.argv[1]))
