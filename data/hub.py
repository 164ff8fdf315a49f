"""Downloads: models and data sets of the Hugging Face hub, and small files by URL.

The hub is accessed by the optional package huggingface_hub, which caches files, resumes downloads
and uses the access token. HF_ENDPOINT names a mirror.
"""

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

from train.base.errors import DataError, require

HUB = "https://huggingface.co"
# Anyone on the way can change plain http.
TRUSTED_URL = r"https://|http://(localhost|127(\.\d+){3})(:\d+)?(/|$)"
CONFIG_FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
                "chat_template.jinja"]
MAX_JSON_BYTES = 1 << 27
WEIGHT_FILES = ["model*.safetensors", "model.safetensors.index.json"]
MAX_FILE_BYTES = 100 << 30  # twice what the hub sends by HTTP
MAX_SECONDS = 24 * 3600
MAX_JSON_SECONDS = 600


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
    limits = (MAX_FILE_BYTES, MAX_SECONDS) if weights else (MAX_JSON_BYTES, MAX_JSON_SECONDS)
    folder = download(name, "snapshot_download", *limits, repo_id=name[3:],
                      allow_patterns=CONFIG_FILES + WEIGHT_FILES * weights)
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


def download(name, function, max_bytes=MAX_FILE_BYTES, max_seconds=MAX_SECONDS, **arguments):
    """Return the path that a download function of huggingface_hub returns. Raises DataError for
    `name`, also if a file has more than max_bytes, or all files take more than max_seconds."""
    require("huggingface_hub", name)
    endpoint = os.environ.get("HF_ENDPOINT") or HUB
    if not re.match(TRUSTED_URL, endpoint):
        raise DataError(f"{endpoint}: expected the https:// address of a mirror of {HUB}")
    request = [function, max_bytes, max_seconds, arguments | dict(endpoint=endpoint.rstrip("/"))]
    # In a child process, which can be ended: huggingface_hub limits the time between two bytes
    # only, and a mirror may send without end.
    done = subprocess.run([sys.executable, "-m", "data.hub", json.dumps(request)],
                          cwd=Path(__file__).parents[1], stdout=subprocess.PIPE)
    answer = json.loads(done.stdout or '{"error": "the process was killed"}')
    if "error" in answer:
        raise DataError(f"{name}: could not be downloaded ({answer['error']}). "
                        "The same command resumes the download; HF_ENDPOINT names a mirror. "
                        "Without a network, copy the files and give their path")
    return answer["path"]


def run_download(function, max_bytes, max_seconds, arguments):
    """Call a download function of huggingface_hub within these limits, print {"path": ...} or
    {"error": ...} as JSON, and end this process."""
    import huggingface_hub
    from huggingface_hub.constants import HF_HUB_CACHE

    def end(**answer):
        print(json.dumps(answer), flush=True)
        os._exit(0)

    def give_up():
        repo = f"{arguments.get('repo_type', 'model')}s/{arguments['repo_id']}".replace("/", "--")
        folder = Path(arguments.get("local_dir") or Path(HF_HUB_CACHE, repo))
        for path in folder.rglob("*.incomplete"):
            path.unlink(missing_ok=True)
        end(error=f"it took more than {max_seconds:,} seconds")
    threading.Timer(max_seconds, give_up).start()
    with contextlib.suppress(ImportError):  # Windows
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, max_bytes))
    try:
        end(path=getattr(huggingface_hub, function)(**arguments))
    except BaseException as error:  # many types, of the network and of the hub; Ctrl-C
        reason, *_ = str(error).strip().splitlines() or [""]
        end(error=f"{type(error).__name__}: {reason:.200}")


def fetch_file(url, sha256):
    """Return the content (bytes) of a small file after checking the sha256. Raises OSError."""
    import requests  # a dependency of tiktoken; slow to import
    reply = requests.get(url, timeout=20)
    reply.raise_for_status()
    if hashlib.sha256(reply.content).hexdigest() != sha256:
        raise OSError("the content has another sha256")
    return reply.content


if __name__ == "__main__":
    run_download(*json.loads(sys.argv[1]))
