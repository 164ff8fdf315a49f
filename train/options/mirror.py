"""Copies of a run's checkpoints in a store: s3://, gs:// or a folder (key: mirror).

The store has the last two copies of ckpt.pt, e.g. copy_000002.pt, numbered in the order of copying,
and ckpt_best.pt. Copies are made in the background, one at a time; of the saves during a copy, only
the last one is copied. A failure is a warning. Each file ends with its digest, and an older copy is
deleted after a newer one is complete: an incomplete copy is never used, and never the only one. Of
a sharded checkpoint the store has the files of shards/ too, copied before the manifest.
"""

import contextlib
import glob
import os
import threading

from train.base import sharded_file
from train.base.checkpoint_file import verify_digest
from train.base.errors import CheckpointError, SetupError, require
from train.base.files import add_link
from train.base.run_folder import restarted_job


class Mirror:
    """Copies of the checkpoints of the run folder `folder` in a store, config.mirror: the URL
    s3://... or gs://..., or a folder. Call fetch() at the start of the run, update() after a save,
    finish() at the end. SetupError if the URL is not supported."""

    def __init__(self, config, folder):
        fsspec = require("fsspec", "mirror")
        try:  # the listings of a store must not be cached
            self.fs, self.root = fsspec.url_to_fs(config.mirror, use_listings_cache=False)
        except (ImportError, ValueError) as error:  # e.g. "Install s3fs to access S3"
            raise SetupError(f"mirror: {config.mirror}: {error}") from error
        self.pattern = glob.escape(self.root)
        self.fs.auto_mkdir = True  # of a folder, which is then created
        self.disk = fsspec.filesystem("file")
        self.config = config
        self.folder = folder
        self.lock = threading.Lock()  # one copy at a time
        self.thread = None            # of the last save

    def copies(self):
        """Return the paths (texts, in the store's file system) of the copies of ckpt.pt in the
        store, oldest first, complete or not."""
        return sorted(self.fs.glob(f"{self.pattern}/copy_*.pt"))

    def fetch(self, log):
        """Copy the newest complete copy in the store to ckpt.pt in the run folder, and the best
        checkpoint to ckpt_best.pt; without copies, write an empty file to the store as a test. No
        effect if the run folder has a checkpoint or config.resume_file is set. log(text) is called
        per file. CheckpointError if the store cannot be used, if all copies are incomplete, or if
        there are copies although config.resume is "never" (not in a job torchrun restarted)."""
        c = self.config
        never = c.resume == "never" and not restarted_job(self.folder)[1]
        exists = {"ckpt.pt", "ckpt_prev.pt"}.intersection(os.listdir(self.folder))
        if not never and (exists or c.resume_file):
            return
        best = f"{self.root}/ckpt_best.pt"
        try:
            copies = self.copies()
            if not copies:  # an error in the URL ends the run before it starts
                return self.fs.pipe_file(f"{self.root}/writable", b"")
            if never:
                raise ValueError("--resume never, and it has the checkpoints of a run")
            if self.fs.exists(best):
                self.get(best, "ckpt_best.pt", log)
            if not any(self.get(path, "ckpt.pt", log) for path in reversed(copies)):
                raise ValueError(f"none of its {len(copies)} checkpoints is complete")
        except Exception as error:
            raise CheckpointError(f"mirror: {c.mirror} cannot be used: {error!r:.300}; the run may "
                                  "have a checkpoint there: try again or choose another") from error

    def get(self, path, name, log):
        """Copy the file `path` of the store, and its shards, to `name` in the run folder. Return
        whether the copy is complete; otherwise `name` does not change. log(text): for messages."""
        log(f"Copying {name} from {self.config.mirror}")
        target = os.path.join(self.folder, name)
        temporary = f"{target}.tmp.{os.getpid()}"
        self.fs.get_file(path, temporary)
        with contextlib.suppress(ValueError):
            if self.get_shards(temporary) or verify_digest(temporary):
                os.replace(temporary, target)
                return True
        log(f"warning: {path} is damaged or incomplete")
        return False

    def get_shards(self, manifest):
        """Copy the shards of the checkpoint `manifest`, a file in the run folder, from the store to
        the run folder; existing shards are replaced. Return True, or False if the file does not
        begin like a manifest. ValueError if the rest of the manifest or a shard is damaged, or a
        shard is missing."""
        folder = sharded_file.folder_named_in(manifest)
        if not folder:
            return False
        for path in self.fs.find(f"{self.root}/{folder}"):
            name = path.rpartition(f"/{folder}/")[2]
            if sharded_file.SHARD_FILE.fullmatch(name):
                local = os.path.join(self.folder, folder, name)
                os.makedirs(os.path.dirname(local), exist_ok=True)
                self.fs.get_file(path, local)
        shards = sharded_file.open_shards(manifest)
        shards.verify(shards.files)
        return True

    def update(self, logger):
        """Start to copy the ckpt.pt just saved, and ckpt_best.pt, to the store, in the background.
        logger.warn(text) reports a failure."""
        self.thread = threading.Thread(target=self.copy, args=[logger], daemon=True)
        self.thread.start()

    def finish(self, logger):
        """Wait for the last copy; logger.warn(text) if that takes config.dist_timeout seconds."""
        if self.thread:
            self.thread.join(self.config.dist_timeout)
            if self.thread.is_alive():
                logger.warn(f"mirror: {self.config.mirror} lacks the last checkpoint: dist_timeout")

    def copy(self, logger):
        """Copy ckpt_best.pt, if it has changed, and ckpt.pt to the store; then delete all but the
        last two copies of ckpt.pt. Without effect if ckpt.pt was already copied, or if the
        thread of a later save waits to copy it. Failures are warnings, logger.warn(text)."""
        with self.lock:
            if threading.current_thread() is not self.thread:
                return
            try:
                copies = self.copies()
                if os.path.exists(os.path.join(self.folder, "ckpt_best.pt")):
                    self.put("ckpt_best.pt", f"{self.root}/ckpt_best.pt")
                # The thread before has copied a newer save than its own.
                if copies and self.is_copy(os.path.join(self.folder, "ckpt.pt"), copies[-1]):
                    return
                number = int(copies[-1][-9:-3]) + 1 if copies else 1
                self.put("ckpt.pt", f"{self.root}/copy_{number:06d}.pt")
                for path in copies[:-1]:
                    self.fs.rm_file(path)
                self.remove_unnamed_shards()
            except Exception as error:
                logger.warn(f"mirror: {self.config.mirror} did not take ckpt.pt: {error!r:.300}")

    def put(self, name, path):
        """Copy the checkpoint `name` of the run folder to `path` in the store, its shards first;
        equal files are skipped. Raises OSError if the size or the end of a copy differs."""
        source = os.path.join(self.folder, name)
        link = f"{source.removesuffix('.pt')}.tmp.{os.getpid()}.pt"
        add_link(source, link)  # the run may replace the file, and keeps its shards
        try:
            folder = sharded_file.folder_named_in(link)
            files = sharded_file.open_shards(link).files if folder else ()
            pairs = [(os.path.join(self.folder, folder, file), f"{self.root}/{folder}/{file}")
                     for file in files]
            for local, remote in [*pairs, (link, path)]:
                if not self.is_copy(local, remote):
                    self.fs.put_file(local, remote)
                    if not self.is_copy(local, remote):
                        raise OSError(f"{remote} has another size or digest than {local}")
        finally:
            os.unlink(link)

    def is_copy(self, local, remote):
        """Return whether the file `remote` in the store exists and has the same size and the same
        last KiB, which contains the digest, as the file `local`."""
        return self.fs.exists(remote) and (self.fs.size(remote), self.fs.tail(remote)) == (
            self.disk.size(local), self.disk.tail(local))

    def remove_unnamed_shards(self):
        """Remove the folders of shards in the store to which no checkpoint in the store refers."""
        heads = [self.fs.head(path) for path in self.fs.glob(f"{self.pattern}/*.pt")]
        for folder in self.fs.glob(f"{self.pattern}/shards/*"):
            name = f'{{"folder": "shards/{os.path.basename(folder)}"'.encode()
            if not any(head.startswith(name) for head in heads):
                self.fs.rm(folder, recursive=True)
