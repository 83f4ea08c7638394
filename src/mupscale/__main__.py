"""`python -m mupscale`, for torchrun and wherever the script is not on the path."""

import sys

from mupscale.cli import main

if __name__ == "__main__":
    sys.exit(main())
