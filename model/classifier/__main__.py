import sys

from model.classifier import main

if __name__ == "__main__":
    sys.exit(main())
