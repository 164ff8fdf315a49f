"""One writer a folder: a run that starts where another is running says so and ends."""

import os
import socket

from train.checkpoint import CheckpointError


class FolderLock:
    """Exclusive use of a run folder while the process lives; the system frees a dead holder's lock.
    Raises CheckpointError naming the holder where there is one."""

    def __init__(self, folder):
        self.file = open(os.path.join(folder, ".lock"), "a+")
        try:
            import fcntl  # POSIX; without it there is no lock
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            return
        except BlockingIOError:
            self.file.seek(0)
            holder = self.file.read().strip() or "another process"
            self.file.close()
            raise CheckpointError(f"{folder} is in use by {holder}; wait for it, stop it, or "
                                  "choose another --out_dir") from None
        except OSError:  # a file system without locks
            return
        self.file.truncate(0)
        self.file.write(f"pid {os.getpid()} on {socket.gethostname()}")
        self.file.flush()

    def release(self):
        self.file.close()
