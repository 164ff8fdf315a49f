"""Sharded checkpoints: .safetensors files, one or two per rank, and a manifest.

    out/ckpt.pt                                          the manifest (path of the checkpoint)
    out/shards/0001000_ab12cd/manifest.json              the same file, as a hard link
                              shard-00001-model-00001-of-00001.safetensors  weights of rank 0
                              optimizer/shard-00001-...safetensors          other tensors of rank 0

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
    """Return a new folder name, relative to the run's folder, e.g. shards/0001000_ab12cd."""
    return f"shards/{iter_num:07d}_{secrets.token_hex(3)}"


def write_shards(folder, rank, parts):
    """Write the tensors of one rank durably to the folder `folder`; return (files, chunks).

    rank: for the file names.
    parts: {name: [offsets, tensor]}; offsets: position in the complete tensor, per dimension.
    files: {file, relative to `folder`: {"size": bytes, "sha256": digest}}.
    chunks: {name: {"file", "start", "offsets", "shape"}}; start: byte offset in the file.
    Weights (names "model.*") go to one .safetensors file, other tensors to a second one, in the
    subfolder optimizer/. A file without tensors is not written; a missing folder is created.
    """
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
    """Return the manifest (bytes) of the shards in root/folder, for a file in `root`.

    root: the run's folder; folder: a result of new_folder().
    state: content of the checkpoint, a nested dict with tensors on the meta device.
    written: list of the (files, chunks) that write_shards() returned on each rank.
    Renames of the shards are made durable first. Raises ValueError if a file is missing or not of
    this checkpoint, or if the chunks of a tensor do not form the complete tensor.
    """
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
    """Return a nested state as plain JSON types, for json.dumps.

    path: keys of `value` in the complete state; a tensor's are joined to its dotted name.
    Tensors, tuples, bytes, non-finite floats, and dicts with a key that is no string or begins with
    "$" become {"$tensor": name}, {"$tuple": ...}, {"$bytes": ...}, {"$float": ...}, {"$dict": ...}.
    """
    if isinstance(value, torch.Tensor):
        return {"$tensor": ".".join(map(str, path))}
    if isinstance(value, dict):
        items = {k: encode(v, (*path, k)) for k, v in value.items()}
        is_plain = all(isinstance(k, str) and k[:1] != "$" for k in value)
        return items if is_plain else {"$dict": [[encode(k), v] for k, v in items.items()]}
    if isinstance(value, list):
        return [encode(v, (*path, i)) for i, v in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": encode([*value], path)}
    if isinstance(value, bytes):
        return {"$bytes": value.decode("latin-1")}
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    return value


def decode(value, tensor):
    """Return the state that encode() made into `value`; tensor(dotted name) returns each tensor."""
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
    """The files of a sharded checkpoint, as opened by open_shards().

    folder: path of the folder with the files.
    files: {file name: {"size": bytes, "sha256": digest}}.
    tensors: {dotted name: {"dtype", "shape", "chunks"}}; chunks: dicts of write_shards().
    plain: the content of the checkpoint, as returned by encode(); for decode().
    """
    folder: str
    files: dict
    tensors: dict
    plain: dict

    def check(self):
        """Raise ValueError unless the files and sizes match self.files, and chunks form tensors."""
        for name, file in self.files.items():
            path = os.path.join(self.folder, name)
            if not os.path.isfile(path) or not SHARD_FILE.fullmatch(name):
                raise ValueError(f"{path} is missing (do all ranks share the file system?), or is "
                                 "not a shard")
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
        """Read the files `names`; raise ValueError unless they match the digests in self.files."""
        for name in names:
            path = os.path.join(self.folder, name)
            if digest(path) != self.files[name]["sha256"]:
                raise ValueError(f"{path} is damaged: its content does not match its digest")

    def meta(self, name):
        """Return a meta tensor with the shape and dtype of the tensor `name` (dotted)."""
        t = self.tensors[name]
        return torch.empty(t["shape"], dtype=SAFETENSORS_DTYPES[t["dtype"]], device="meta")

    def read(self, name, first=0, shape=None):
        """Return the tensor `name` (dotted) on the CPU, or only shape[0] rows from row `first`.

        shape: of the result; `None`: all rows, with `first` 0. Rows are indices of dimension 0;
        other rows are not read. Digests are not checked. ValueError if a file is too short.
        """
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
    """Return (first row, row count) of a chunk in dimension 0; a 0-dim tensor is one row."""
    return (*chunk["offsets"], 0)[0], (*chunk["shape"], 1)[0]


def is_sharded(path):
    """Return whether `path` is a sharded checkpoint: a manifest, or a folder with manifest.json."""
    return os.path.isfile(os.path.join(path, MANIFEST)) or folder_named_in(path) is not None


def folder_named_in(path):
    """Return the shard folder, relative to the run's, of a manifest; `None` for other paths."""
    if not os.path.isfile(path):  # not a pipe, which would be read for ever
        return None
    with open(path, "rb") as f:
        match = HEAD.match(f.read(100))
    return match and match[1].decode()


def open_shards(path):
    """Return the Shards of a manifest, or of a folder with manifest.json.

    Raises ValueError if the manifest is damaged or of a newer version, or if files are missing,
    not listed or have other sizes; OSError if the manifest cannot be read.
    The digests of the files are not checked: call Shards.verify().
    """
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
    return shards


# -----------------------------------------------------------------------------
# folders of shards

def link_shards(path, target):
    """Add the shards of the checkpoint `path`, if any, to the folder `target`, as hard links.

    They get the same subfolder, e.g. shards/0001000_ab12cd. Copies if there are no hard links.
    """
    folder = folder_named_in(path) or ""
    source = os.path.join(os.path.dirname(path), folder)
    if folder and os.path.isdir(source):
        shutil.copytree(source, os.path.join(target, folder), copy_function=add_link,
                        dirs_exist_ok=True)


def unnamed_shards(root):
    """Return the folders of shards (pathlib.Path) in a run's folder that no ckpt*.pt in it uses."""
    named = {folder_named_in(path) for path in pathlib.Path(root).glob("ckpt*.pt")}
    folders = {f"shards/{path.name}": path for path in pathlib.Path(root).glob("shards/*_*")}
    return [path for folder, path in folders.items()
            if HEAD.match(b'{"folder": "%s"' % os.fsencode(folder)) and folder not in named]


def remove_unnamed_shards(root, kept=()):
    """Delete the folders of unnamed_shards(root), except `kept`, ignoring failed deletions."""
    for path in unnamed_shards(root):
        if path not in kept:
            with suppress(OSError):  # first: without it, the rest is known as incomplete
                os.unlink(path / MANIFEST)
            shutil.rmtree(path, ignore_errors=True)
