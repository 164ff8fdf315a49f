"""Copies of the checkpoints of a run in a store: s3://, gs:// or a folder (key: mirror).

The store has the last two copies of ckpt.pt, e.g. copy_000002.pt, numbered in the order of copying,
and ckpt_best.pt. Copies are made in the background, one at a time; of the saves during a copy, only
the last one is copied. A failure is a warning. Digests are verified, so an incomplete copy is never
used, and an older copy of ckpt.pt is deleted only after a newer one is complete.
Of a sharded checkpoint, the files of shards/ are copied before the manifest, ckpt.pt.
"""

import contextlib
import glob
import os
import threading

from train.base import sharded_file
from train.base.checkpoint_file import is_temporary, open_checkpoint, verify_digest
from train.base.errors import CheckpointError, SetupError, require
from train.base.files import add_link
from train.base.run_folder import move_files, restarted_job


class Mirror:
    """Copies of the checkpoints in the run's `folder` in a store, made on rank 0.

    config.mirror: a URL s3://... or gs://..., or a folder. Raises SetupError if the URL is not
    supported or a package is missing. Call fetch() at the start of the run, update() after each
    save, finish() at the end.
    """

    def __init__(self, config, folder):
        fsspec = require("fsspec", "mirror")
        try:  # the listings of a store must not be cached
            self.fs, self.root = fsspec.url_to_fs(config.mirror, use_listings_cache=False)
        except (ImportError, ValueError) as error:  # e.g. "Install s3fs to access S3"
            raise SetupError(f"mirror: {config.mirror}: {error}") from error
        self.fs.auto_mkdir = True  # of a folder, which is then created
        self.disk = fsspec.filesystem("file")
        self.config = config
        self.folder = folder
        self.lock = threading.Lock()  # one copy at a time
        self.thread = None            # of the last save

    def checkpoints(self, start=""):
        """Return the sorted store paths of checkpoints `start`*.pt; OSError if the store fails."""
        with contextlib.suppress(FileNotFoundError):  # no checkpoint yet
            return sorted(path for path in self.fs.ls(self.root, detail=False)
                          if path.endswith(".pt") and os.path.basename(path).startswith(start))
        return []

    def fetch(self, log):
        """Copy the newest complete ckpt.pt, and ckpt_best.pt, from the store before a run starts.

        With resume "never", unless torchrun has restarted the job: copy nothing, and raise
        CheckpointError if the store has copies. Otherwise, with config.resume_file: do nothing; if
        the folder has ckpt.pt or ckpt_prev.pt: call fetch_later(), or do nothing with eval_only.
        If the store has no copies, an empty file is written to it as a test. Raises CheckpointError
        if the store cannot be used or all copies are incomplete. log(text): called with messages.
        """
        c = self.config
        never = c.resume == "never" and not restarted_job(self.folder)[1]
        if c.resume_file:
            return
        names = sorted({"ckpt.pt", "ckpt_prev.pt"}.intersection(os.listdir(self.folder)))
        if names and not never:
            return None if c.eval_only else self.fetch_later(names, log)
        try:
            copies = self.checkpoints("copy_")
            if not copies:  # an error in the URL ends the run before it starts
                return self.fs.pipe_file(f"{self.root}/writable", b"")
            if never:
                raise ValueError("--resume never, and it has the checkpoints of a run")
            self.get_best(log)
            if not self.get_newest(copies, "ckpt.pt", log):
                raise ValueError(f"none of its {len(copies)} checkpoints is complete")
        except Exception as error:
            raise CheckpointError(f"mirror: {c.mirror} cannot be used: {error!r:.300}; the run may "
                                  "have a checkpoint there: try again or choose another") from error

    def fetch_later(self, names, log):
        """Take the newest complete copy if it is of a later step than the folder's `names`.

        The checkpoints `names` and ckpt_best.pt are then moved to a subfolder. Only a warning if
        the store cannot be read. log(text): for messages. Raises SetupError if a later copy is of
        a run with another seed or other data.
        """
        paths = [os.path.join(self.folder, name) for name in names]
        fetched = os.path.join(self.folder, "ckpt_mirror.pt")
        try:
            copies = self.checkpoints("copy_")
            if not copies or any(self.is_copy(path, copies[-1]) for path in paths):
                return
            if not self.get_newest(copies, "ckpt_mirror.pt", log):
                return
            if not all(self.is_later(fetched, path) for path in paths):
                return
            names = [*names, *{"ckpt_best.pt"}.intersection(os.listdir(self.folder))]
            log(f"{self.config.mirror} has a later step: moved {', '.join(names)} to "
                f"{move_files(self.folder, names)}")
            os.replace(fetched, os.path.join(self.folder, "ckpt.pt"))
            self.get_best(log)
        except SetupError:
            raise
        except Exception as error:
            log(f"warning: mirror: {self.config.mirror} cannot be read: {error!r:.300}")
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(fetched)

    def is_later(self, fetched, path):
        """Return whether `fetched` is later or `path` is damaged; SetupError if of another run."""
        later = open_checkpoint(fetched)[0]
        try:
            state = open_checkpoint(path)[0]
        except CheckpointError as error:
            if is_temporary(error):
                raise
            return True
        if state["iter_num"] >= later["iter_num"]:
            return False
        if (state["rng"], state["data"]) != (later["rng"], later["data"]):
            raise SetupError(f"mirror: {self.config.mirror} has the checkpoints of a run with "
                             "another seed or other data; choose another")
        return True

    def get_newest(self, copies, name, log):
        """Copy the newest complete one of `copies`, oldest first, to `name`; return if one is."""
        return any(self.get(path, name, log) for path in reversed(copies))

    def get_best(self, log):
        """Copy ckpt_best.pt from the store to the run's folder if the store has it."""
        if self.fs.exists(f"{self.root}/ckpt_best.pt"):
            self.get(f"{self.root}/ckpt_best.pt", "ckpt_best.pt", log)

    def get(self, path, name, log):
        """Copy checkpoint `path` in the store, with shards, to the file `name` in the run's folder.

        Return whether the copy is complete and undamaged; if not, `name` is unchanged. log(text):
        called with messages. Errors of the store are raised.
        """
        log(f"Copying {os.path.basename(path)} from {self.config.mirror}")
        target = os.path.join(self.folder, name)
        temporary = f"{target}.tmp.{os.getpid()}"
        self.fs.get_file(path, temporary)
        with contextlib.suppress(ValueError):
            if self.get_shards(temporary) or verify_digest(temporary):
                os.replace(temporary, target)
                return True
        os.unlink(temporary)
        log(f"warning: {path} is damaged or incomplete")
        return False

    def get_shards(self, manifest):
        """Copy and verify the shards of a manifest; return False if the file is not a manifest.

        manifest: path in the run's folder, where existing shards are replaced. Raises ValueError if
        a shard is missing, or if the manifest or a shard is damaged.
        """
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
        """Start a thread that copies ckpt.pt and ckpt_best.pt to the store, see copy()."""
        self.thread = threading.Thread(target=self.copy, args=[logger], daemon=True)
        self.thread.start()

    def finish(self, logger):
        """Wait for the last update(); after config.dist_timeout seconds, call logger.warn(text)."""
        if self.thread:
            self.thread.join(self.config.dist_timeout)
            if self.thread.is_alive():
                logger.warn(f"mirror: {self.config.mirror} lacks the last checkpoint: dist_timeout")

    def copy(self, logger):
        """Copy changed ckpt_best.pt and ckpt.pt to the store, in the thread of update().

        Then delete all copies of ckpt.pt except the last two, and unused shards. Do nothing if
        update() was called again. Failures are not raised: logger.warn(text) is called.
        """
        with self.lock:
            if threading.current_thread() is not self.thread:
                return
            try:
                copies = self.checkpoints("copy_")
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
        """Copy checkpoint `name` in the run's folder to `path` in the store, shards first.

        Files that are equal in the store are skipped. Raises OSError if a copy differs in size or
        the last KiB, and errors of the store; an incomplete copy of ckpt.pt is deleted.
        """
        # In a folder, the last copy of `name` stays until the next is complete, as in S3.
        part = f"{path}.part" if type(self.fs) is type(self.disk) else path
        source = os.path.join(self.folder, name)
        link = f"{source.removesuffix('.pt')}.tmp.{os.getpid()}.pt"
        add_link(source, link)  # the run may replace the file, and keeps its shards
        try:
            folder = sharded_file.folder_named_in(link)
            files = sharded_file.open_shards(link).files if folder else ()
            pairs = [(os.path.join(self.folder, folder, file), f"{self.root}/{folder}/{file}")
                     for file in files]
            is_new = not self.is_copy(link, path)
            for local, remote in pairs + [(link, part)] * is_new:
                if not self.is_copy(local, remote):
                    self.fs.put_file(local, remote)
                    if not self.is_copy(local, remote):
                        raise OSError(f"{remote} has another size or digest than {local}")
            if is_new and part != path:
                self.fs.mv(part, path)
        except Exception:
            with contextlib.suppress(Exception):  # what is incomplete would fill the store
                is_own = part != path or name == "ckpt.pt"  # no earlier copy has this name
                if is_own and self.fs.exists(part) and not self.is_copy(link, part):
                    self.fs.rm_file(part)
                self.remove_unnamed_shards()
            raise
        finally:
            os.unlink(link)

    def is_copy(self, local, remote):
        """Return whether the store's file `remote` has the size and last KiB of `local` on disk."""
        return self.fs.exists(remote) and (self.fs.size(remote), self.fs.tail(remote)) == (
            self.disk.size(local), self.disk.tail(local))

    def remove_unnamed_shards(self):
        """Delete the folders of shards in the store that no checkpoint (*.pt) in it uses."""
        heads = [self.fs.head(path) for path in self.checkpoints()]
        for folder in self.fs.glob(f"{glob.escape(self.root)}/shards/*"):
            name = f'{{"folder": "shards/{os.path.basename(folder)}"'.encode()
            if not any(head.startswith(name) for head in heads):
                self.fs.rm(folder, recursive=True)
