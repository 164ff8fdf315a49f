import sys

from model.sample import main

if __name__ == "__main__":
    sys.exit(main())
