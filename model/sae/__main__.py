import sys

from model.sae.features import main

if __name__ == "__main__":
    sys.exit(main())
