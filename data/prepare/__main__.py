import sys

from data.prepare import main

if __name__ == "__main__":
    sys.exit(main())
