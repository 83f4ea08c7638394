"""`python -m mupscale` is the command `mupscale`; torchrun starts it so."""

import os
import sys

from mupscale.cli import main

if __name__ == "__main__":
    __spec__ = None  # so that processes which are started by a class of one's own import this, and find its module
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    if os.environ.get("WORLD_SIZE", "1") != "1":  # all is written; threads of torch's may abort a longer goodbye
        os._exit(status)
    sys.exit(status)
