"""`python -m ddrl.serve`: the command line stands in `ddrl.run.serving`, which hands this stage what it shares with
others."""

import sys

from ddrl.run.serving import main

if __name__ == "__main__":
    sys.exit(main())
