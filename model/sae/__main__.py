import sys

from model.sae import main

if __name__ == "__main__":
    sys.exit(main())
