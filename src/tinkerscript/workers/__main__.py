"""`python -m tinkerscript.workers`: one worker process."""

import sys

from tinkerscript.workers.process import main

if __name__ == "__main__":
    sys.exit(main())
