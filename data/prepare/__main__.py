import signal
import sys

from data.prepare import main

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave through the clean-up, as Ctrl-C
    sys.exit(main())
