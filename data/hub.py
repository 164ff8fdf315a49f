"""Downloads of models and data sets from the Hugging Face hub.

The hub is accessed by the optional package huggingface_hub, which caches files and uses the user's
access token. The environment variable HF_ENDPOINT is the address of a mirror.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from train.base.errors import DataError, UserError, require
from train.base.memory import call_libc

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
MAX_MEMORY_BYTES = 1 << 33  # also for the list of files, which huggingface_hub reads as a whole
MAX_SECONDS = 24 * 3600
MAX_JSON_SECONDS = 600
# Audit events of what creates files and links; the index of the new path among the arguments.
WRITES = {"open": 0, "os.mkdir": 0, "os.link": 1, "os.rename": 1, "os.symlink": 1}


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
    Errors, only for hf:...: DataError for an invalid name, a failed download, invalid files, and a
    model without config.json; SetupError without huggingface_hub or, for weights, safetensors.
    """
    if not name.startswith("hf:"):
        return os.path.expanduser(name)
    if not re.fullmatch(r"hf:[\w-][\w.-]*(/[\w-][\w.-]*)?", name):
        raise DataError(f"{name}: expected hf:OWNER/NAME, as on {HUB}")
    arguments = dict(function="snapshot_download", repo_id=name[3:])
    folder = download(name, max_bytes=MAX_JSON_BYTES, max_seconds=MAX_JSON_SECONDS,
                      allow_patterns=CONFIG_FILES, **arguments)
    check_files(name, folder, ".json")
    check_files(name, folder, ".jinja")
    if not os.path.exists(os.path.join(folder, "config.json")):
        raise DataError(f"{name}: the repository has no config.json: it is no model")
    if weights:
        folder = download(name, allow_patterns=WEIGHT_FILES, **arguments)
        check_files(name, folder, ".safetensors")
    return folder


def check_files(name, folder, ending):
    """Delete a model's damaged files *ENDING in `folder`, and raise DataError if any was found."""
    invalid = set()
    for path in Path(folder).glob("*" + ending):
        try:
            if ending == ".safetensors":
                require("safetensors", name).safe_open(path, "np")  # compares sizes
                continue
            text = path.read_text("utf-8")
            found = json.loads(text).keys() if ending == ".json" else text
            if path.name in CONTENT and CONTENT[path.name] not in found:
                raise ValueError
        except (OSError, MemoryError, UserError):
            raise
        except Exception:
            invalid |= {path.resolve(), path}
    for path in invalid:
        path.unlink(missing_ok=True)
    if names := sorted(path.name for path in invalid if path.suffix == ending):
        raise DataError(f"{name}: deleted {', '.join(names)}: expected the {ending[1:]} files of a "
                        "model. Check the network and the mirror, and try again")


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
    request = json.dumps([function, max_bytes, max_seconds, arguments | dict(endpoint=endpoint)])
    # In a child process, which can be ended: huggingface_hub limits the time between two bytes
    # only, and a mirror may send without end.
    done = subprocess.run([sys.executable, "-m", "data.hub", request],
                          cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True)
    if done.returncode == 0:
        return done.stdout.removesuffix("\n")
    reason = done.stdout.strip() or f"it was killed, or took more than {max_seconds:,} seconds"
    raise DataError(f"{name}: could not be downloaded ({reason}). The same command downloads "
                    "the missing files; HF_ENDPOINT names a mirror. Without a network, copy the "
                    "files and give their path")


def check_write(folders, event, *args):
    """Raise PermissionError if an audit event writes outside of `folders`, a list of Paths.

    Moving or linking a file from outside is refused, too; parents of `folders` can be made.
    """
    # O_WRONLY is 1, O_RDWR 2; a file that is opened by its number exists.
    if event in WRITES and (event != "open" or args[2] & 3 and not isinstance(args[0], int)):
        new = Path(args[WRITES[event]])
        for path in (new, new.parent / args[0]):
            path = path.parent.resolve() / path.name
            if not any(path.is_relative_to(f) or f.is_relative_to(path) for f in folders):
                raise PermissionError(f"outside of the cache, do not use this mirror: {path}")


def run_download(function, max_bytes, max_seconds, arguments):
    """Call huggingface_hub.FUNCTION(**arguments) in the child process, and print the returned path.

    After an error, print the error and exit with code 1. On Linux, the system ends the process
    after max_seconds or when the parent ends, and limits each file to max_bytes and memory to 16 *
    max_bytes (at most MAX_MEMORY_BYTES). Writes are refused except to a model's folder and locks in
    the cache, or to the argument local_dir, which a data set needs.
    """
    os.environ["HF_HUB_DISABLE_SHARED_BLOBS"] = "1"  # files outside of this folder
    import huggingface_hub.constants
    with contextlib.suppress(ImportError, AttributeError):  # Windows; macOS
        import resource
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the parent may ignore it
        signal.alarm(max_seconds)
        limits = {resource.RLIMIT_FSIZE: max_bytes,
                  resource.RLIMIT_DATA: min(16 * max_bytes, MAX_MEMORY_BYTES)}
        for kind, limit in limits.items():
            present = resource.getrlimit(kind)[1]  # which only root may raise
            limit = limit if present == resource.RLIM_INFINITY else min(limit, present)
            resource.setrlimit(kind, (limit, limit))
        call_libc("prctl", 1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    # huggingface_hub makes paths of what the server sends: ETag, commit, names of files.
    repo = "models--" + arguments["repo_id"].replace("/", "--")
    cache = Path(huggingface_hub.constants.HF_HUB_CACHE).resolve()
    folders = [Path(arguments.get("local_dir", cache / repo)).resolve(), cache / ".locks" / repo]
    try:
        huggingface_hub.get_token()  # may write a new access token
        start = getattr(huggingface_hub, function)  # some modules write files when imported
        sys.addaudithook(lambda event, args: check_write(folders, event, *args))
        path = start(**arguments)
        sys.audit("os.mkdir", os.path.join(path, "file"))  # it must be in these folders, too
        print(path)
    except BaseException as error:  # many types, of the network and of the hub; Ctrl-C
        reason, *_ = str(error).strip().splitlines() or [""]
        print(f"{type(error).__name__}: {reason:.200}", flush=True)
        os._exit(1)  # without waiting for the other files


if __name__ == "__main__":
    run_download(*json.loads(sys.argv[1]))
