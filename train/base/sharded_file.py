"""Sharded checkpoints: .safetensors files, one or two per rank, and a manifest.

    out/ckpt.pt                                          the manifest: the checkpoint's name
    out/shards/0001000_ab12cd/manifest.json              the same file, as a hard link
                              shard-00001-model-00001-of-00001.safetensors      weights of rank 0
                              optimizer/shard-00001-...safetensors              its other tensors

The manifest is JSON: size and SHA-256 of every file; shape, dtype and chunks of every tensor; the
plain state of the run; last, the SHA-256 of everything before. It is written when all files are
durable, so a checkpoint without it is incomplete, and no part of a checkpoint can be missing, old
or damaged without notice. Each save has a separate folder. Nothing is unpickled.

The weights are laid out as by HuggingFaceStorageWriter of torch.distributed.checkpoint, whose
reader and consolidate_safetensors_files read the folder.
"""

import hashlib
import json
import math
import os
import pathlib
import re
import secrets
import shutil
from contextlib import suppress
from dataclasses import dataclass

import torch

from train.base.files import add_link, sync_folder
from train.base.tensors import SAFETENSORS_DTYPES, digest, named_tensors, write_safetensors

VERSION = 1  # of the manifest
MANIFEST = "manifest.json"
HEAD = re.compile(rb'{"folder": "(shards/\d{7,}_[0-9a-f]{6})"')  # of a manifest
TAIL = b', "sha256": "%s"}\n'
SHARD = "shard-{:05}-model-00001-of-00001.safetensors"
SHARD_FILE = re.compile(r"(optimizer/)?shard-[\w-]+\.safetensors")  # only these: inside the folder


# -----------------------------------------------------------------------------
# writing

def new_folder(iter_num):
    """Return a new, unique name for a folder of shards, relative to the folder of the run, e.g.
    shards/0001000_ab12cd. Nothing is created."""
    return f"shards/{iter_num:07d}_{secrets.token_hex(3)}"


def write_shards(folder, rank, parts):
    """Write the tensors of a rank, `parts` {name: [offsets in the whole tensor, tensor]}, durably
    to one .safetensors file in `folder` for weights (names "model.*") and one for the others.
    Return ({file: {"size", "sha256"}}, {name: chunk}). A chunk is the place of a part, a dict: the
    part starts at byte `start` of `file`, and has these `offsets` in the whole tensor and this
    `shape`."""
    files = {}
    chunks = {}
    for subfolder, prefix in (("", "model."), ("optimizer/", "")):
        own = {name.removeprefix(prefix): part for name, part in parts.items()
               if name.startswith("model.") == bool(prefix)}
        if not own:
            continue
        file = subfolder + SHARD.format(rank + 1)
        path = os.path.join(folder, file)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        info = {name: {"saved_offsets": offsets} for name, (offsets, _) in own.items()}
        files[file] = write_safetensors(
            path, {name: tensor for name, (_, tensor) in own.items()},
            {"DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0"})
        sync_folder(os.path.dirname(path))
        start = files[file]["size"] - sum(tensor.nbytes for _, tensor in own.values())
        for name, (offsets, tensor) in own.items():
            chunks[prefix + name] = dict(file=file, start=start, offsets=offsets,
                                         shape=list(tensor.shape))
            start += tensor.nbytes
    return files, chunks


def make_manifest(root, folder, state, written):
    """Return the content, bytes, of the manifest of the shards in the subfolder `folder` of `root`.
    state: the nested dict of the checkpoint, with tensors on the meta device. written: a list of
    the (files, chunks) that write_shards() returned on every rank. ValueError if a file is not in
    the folder or a tensor is incomplete."""
    names = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
    tensors = {name: dict(dtype=names[t.dtype], shape=list(t.shape), chunks=[])
               for name, t in named_tensors(state)}
    files = {}
    for its_files, chunks in written:
        files |= its_files
        for name, chunk in chunks.items():
            tensors[name]["chunks"].append(chunk)
    Shards(os.path.join(root, folder), files, tensors, {}).check()
    for path in (folder, "shards", "."):
        sync_folder(os.path.join(root, path))
    manifest = dict(folder=folder, version=VERSION, files=files, tensors=tensors,
                    state=encode(state))
    text = json.dumps(manifest, allow_nan=False)[:-1].encode()
    return text + TAIL % hashlib.sha256(text).hexdigest().encode()


def encode(value, path=()):
    """Return a nested state as plain JSON types, for json.dumps. A tensor becomes {"$tensor":
    dotted name}; tuples, bytes, non-finite floats and dicts with other keys than strings become
    {"$TYPE": ...}. path: the keys that lead to `value`."""
    if isinstance(value, torch.Tensor):
        return {"$tensor": ".".join(map(str, path))}
    if isinstance(value, dict):
        items = {k: encode(v, (*path, k)) for k, v in value.items()}
        if all(isinstance(k, str) and k[:1] != "$" for k in value):
            return items
        return {"$dict": [[encode(k), v] for k, v in items.items()]}
    if isinstance(value, (list, tuple)):
        items = [encode(v, (*path, i)) for i, v in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, bytes):
        return {"$bytes": value.decode("latin-1")}
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    return value


def decode(value, tensor):
    """Return the nested state that encode() made `value` from; each tensor is the result of
    tensor(name)."""
    if isinstance(value, list):
        return [decode(v, tensor) for v in value]
    if not isinstance(value, dict):
        return value
    value = {k: decode(v, tensor) for k, v in value.items()}
    kind = next(iter(value), "")
    kinds = {"$tensor": tensor, "$tuple": tuple, "$dict": dict, "$float": float,
             "$bytes": lambda text: text.encode("latin-1")}
    return kinds[kind](value[kind]) if kind[:1] == "$" else value


# -----------------------------------------------------------------------------
# reading

@dataclass
class Shards:
    """The files of a sharded checkpoint in `folder`: state() rebuilds the nested state, read()
    reads a tensor or rows of it, verify() checks digests. Made by open_shards(). files: {name:
    {"size", "sha256"}}; tensors: {name: {"dtype", "shape", "chunks"}}; plain: the state as encode()
    returns it."""
    folder: str
    files: dict
    tensors: dict
    plain: dict

    @property
    def size(self):
        """Number of bytes of all files and of the plain state."""
        return sum(file["size"] for file in self.files.values()) + len(json.dumps(self.plain))

    def state(self, tensor):
        """Return the nested state of the run, in which each tensor is tensor(name), e.g.
        self.meta(name) or self.read(name)."""
        return decode(self.plain, tensor)

    def check(self):
        """Raise ValueError, naming the file or tensor, unless the folder has exactly the files in
        self.files, with their sizes, and the chunks of each tensor form the whole tensor. Digests
        are not verified."""
        for name, file in self.files.items():
            path = os.path.join(self.folder, name)
            if not os.path.isfile(path) or not SHARD_FILE.fullmatch(name):
                raise ValueError(f"{path} is missing, or not a shard")
            if (size := os.path.getsize(path)) != file["size"]:
                raise ValueError(f"{path} has {size:,} bytes, expected {file['size']:,}")
        for path in pathlib.Path(self.folder).rglob("shard-*.safetensors"):
            if path.relative_to(self.folder).as_posix() not in self.files:
                raise ValueError(f"{path} is not of this checkpoint")
        for name, t in self.tensors.items():
            n_rows, *row = t["shape"] or [1]
            n_bytes = math.prod(row) * SAFETENSORS_DTYPES[t["dtype"]].itemsize
            end = 0  # the chunks are rows, one after the other
            for chunk in sorted(t["chunks"], key=lambda chunk: chunk["offsets"]):
                first, rows = rows_of(chunk)
                end_byte = chunk["start"] + rows * n_bytes
                fits = 0 <= chunk["start"] <= end_byte <= self.files[chunk["file"]]["size"]
                if first != end or chunk["shape"][1:] != row or not fits:
                    raise ValueError(f"{name}: {chunk['file']} does not have row {end}")
                end += rows
            if end != n_rows and n_bytes:
                raise ValueError(f"{name}: no file has row {end}")

    def verify(self, names):
        """Raise ValueError if one of the files `names` does not match its digest."""
        for name in names:
            path = os.path.join(self.folder, name)
            if digest(path) != self.files[name]["sha256"]:
                raise ValueError(f"{path} is damaged: its content does not match its digest")

    def meta(self, name):
        """Return the tensor `name` on the meta device: shape and dtype only."""
        t = self.tensors[name]
        return torch.empty(t["shape"], dtype=SAFETENSORS_DTYPES[t["dtype"]], device="meta")

    def read(self, name, first=0, shape=None):
        """Return the tensor `name` on the CPU or, with `shape`, the part of that shape that starts
        at row `first` (dimension 0). Other rows are not read. ValueError if a file is too short."""
        whole = self.meta(name)
        out = torch.empty(whole.shape if shape is None else shape, dtype=whole.dtype)
        if not out.numel():
            return out
        n_rows = len(out) if out.dim() else 1
        data = out.view(n_rows, -1).view(torch.uint8).numpy()  # (rows, bytes)
        for chunk in self.tensors[name]["chunks"]:
            start, size = rows_of(chunk)
            low = max(first, start)
            high = min(first + n_rows, start + size)
            if low >= high:
                continue
            path = os.path.join(self.folder, chunk["file"])
            with open(path, "rb") as f:
                f.seek(chunk["start"] + (low - start) * data.shape[1])
                part = data[low - first:high - first]
                if f.readinto(part) != part.nbytes:
                    raise ValueError(f"{path} is too short")
        return out


def rows_of(chunk):
    """Return (first row, number of rows) of a chunk, a dict with offsets and shape, in the whole
    tensor. A 0-dim tensor counts as one row."""
    return (*chunk["offsets"], 0)[0], (*chunk["shape"], 1)[0]


def is_sharded(path):
    """Return whether `path` is the manifest of a sharded checkpoint, or a folder with one."""
    return os.path.isfile(os.path.join(path, MANIFEST)) or folder_named_in(path) is not None


def folder_named_in(path):
    """Return the folder of shards that the start of the manifest `path` names, relative to the
    run's folder, e.g. "shards/0001000_ab12cd"; `None` if `path` is not a file or does not start as
    a manifest. The rest of the file is not checked."""
    if not os.path.isfile(path):  # not a pipe, which would be read for ever
        return None
    with open(path, "rb") as f:
        match = HEAD.match(f.read(100))
    return match and match[1].decode()


def open_shards(path):
    """Return the Shards of the manifest `path`, or of a folder with a manifest. ValueError unless
    the digest of the manifest is correct and all files are complete. The digests of the files are
    checked by Shards.verify()."""
    path = os.path.join(path, MANIFEST) if os.path.isdir(path) else os.fspath(path)
    data = pathlib.Path(path).read_bytes()
    text = data[:-len(TAIL % bytes(64))]
    if data != text + TAIL % hashlib.sha256(text).hexdigest().encode():
        raise ValueError("damaged: its content does not match its digest")
    manifest = json.loads(data)
    if manifest["version"] > VERSION:
        raise ValueError(f"manifest {manifest['version']} is newer than this program's {VERSION}: "
                         "update the program")
    folder = os.path.dirname(path)
    if os.path.basename(path) != MANIFEST:
        folder = os.path.join(folder, folder_named_in(path))  # not ["folder"], of a later duplicate
    if not os.path.isdir(folder):
        raise ValueError(f"the files are not in {folder}; copy this folder too")
    shards = Shards(folder, *(manifest[name] for name in ("files", "tensors", "state")))
    shards.check()
    if encode(shards.state(shards.meta)) != shards.plain:  # e.g. a tensor under the name of another
        raise ValueError("its state is not as this program writes it")
    return shards


# -----------------------------------------------------------------------------
# folders of shards

def link_shards(path, target):
    """Add hard links (or copies, without hard links) of the files in the folder that the manifest
    `path`, a checkpoint, names, e.g. shards/0001000_ab12cd, to the same subfolder of `target`.
    Without effect if `path` is no manifest, or that folder is missing."""
    folder = folder_named_in(path) or ""
    source = os.path.join(os.path.dirname(path), folder)
    if folder and os.path.isdir(source):
        shutil.copytree(source, os.path.join(target, folder), copy_function=add_link,
                        dirs_exist_ok=True)


def unnamed_shards(root):
    """Return the folders of shards (a list of pathlib.Path) in `root`, a run's folder, to which no
    checkpoint ckpt*.pt in `root` refers: those of failed saves or replaced checkpoints, and copied
    ones."""
    named = {folder_named_in(path) for path in pathlib.Path(root).glob("ckpt*.pt")}
    folders = {f"shards/{path.name}": path for path in pathlib.Path(root).glob("shards/*_*")}
    return [path for folder, path in folders.items()
            if HEAD.match(b'{"folder": "%s"' % folder.encode()) and folder not in named]


def remove_unnamed_shards(root, kept=()):
    """Remove the folders unnamed_shards(root), except those in `kept`, a list of pathlib.Path."""
    for path in unnamed_shards(root):
        if path not in kept:
            with suppress(OSError):  # first: without it, the rest is known as incomplete
                os.unlink(path / MANIFEST)
            shutil.rmtree(path, ignore_errors=True)
