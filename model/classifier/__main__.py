import sys

from model.classifier.report import main

if __name__ == "__main__":
    sys.exit(main())
