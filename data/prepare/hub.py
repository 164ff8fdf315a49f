"""Models of Hugging Face by name: hf:OWNER/NAME is a folder of files, downloaded once."""

import os
import re

from data.prepare.sources import MIRROR, download
from train.base.errors import DataError
from train.base.files import exclusive_lock

HUB = "https://huggingface.co"
SMALL = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
         "chat_template.jinja")
ONE, INDEX = "model.safetensors", "model.safetensors.index.json"


def model_folder(name, weights=True):
    """The folder with the files of the model `name`, or without its weights. What is missing is
    downloaded, checked by the sha256 that comes with it, and gone on with where it was cut; what a
    person put there is taken as it is. DataError."""
    hub = os.environ.get("HF_ENDPOINT") or HUB
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name):
        raise DataError(f"hf:{name}: expected hf:OWNER/NAME, as on {HUB}")
    if not re.match(MIRROR, hub):
        raise DataError(f"HF_ENDPOINT={hub}: expected https:// or file://")
    home = os.environ.get("IRONGPT_CACHE") or os.path.join("~", ".cache", "irongpt")
    folder = os.path.join(os.path.expanduser(home), name.replace("/", "--"))
    os.makedirs(folder, exist_ok=True)
    with exclusive_lock(folder):
        files = Files(folder, f"{hub.rstrip('/')}/{name}/resolve/main")
        if "config.json" not in files.known and os.path.exists(os.path.join(folder, SMALL[0])):
            return folder  # a person's own copy
        try:
            bring(files, weights)
        except OSError as e:
            raise DataError(
                f"hf:{name}: could not be downloaded ({e}). The same command goes on where this "
                "one stopped, HF_ENDPOINT names a mirror; without a network copy config.json, the "
                f".safetensors files and what else there is of {', '.join(SMALL[1:])} and {INDEX} "
                f"to {folder}, with nothing else in it") from None
    return folder


def bring(files, weights):
    """All that is needed of a model. OSError."""
    for name in SMALL:
        files.bring(name, needed=name == "config.json")
    if not weights:
        return
    shards = [ONE]
    if files.bring(INDEX):
        with open(os.path.join(files.folder, INDEX), encoding="utf-8") as f:
            shards = sorted(set(re.findall(r'"([\w.-]+\.safetensors)"', f.read())))
    for name in shards:
        files.bring(name, needed=True)


class Files:
    """Files at `url` that are kept in `folder`. SHA256SUMS there says which have come; "-": there
    is none."""

    def __init__(self, folder, url):
        self.folder, self.url, self.known = folder, url, {}
        self.sums = os.path.join(folder, "SHA256SUMS")
        if os.path.exists(self.sums):
            with open(self.sums, encoding="utf-8") as f:
                self.known = dict(reversed(line.split()) for line in f if len(line.split()) == 2)

    def bring(self, name, needed=False):
        """Whether there is such a file; now it is in the folder. OSError."""
        path = os.path.join(self.folder, name)
        if name not in self.known or self.known[name] != "-" and not os.path.exists(path):
            try:
                self.known[name] = download(f"{self.url}/{name}", path)
            except FileNotFoundError:
                if needed:
                    raise
                self.known[name] = "-"
            with open(self.sums, "a", encoding="utf-8") as f:  # the last line of a name counts
                f.write(f"{self.known[name]}  {name}\n")
        return self.known[name] != "-"
