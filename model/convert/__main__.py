import sys

from model.convert import main

if __name__ == "__main__":
    sys.exit(main())
