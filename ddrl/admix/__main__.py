"""`python -m ddrl.serve`: serve the policy of a run, or score a log with it (`ddrl.admix.serving`)."""

import sys

from ddrl.admix.serving import main

if __name__ == "__main__":
    sys.exit(main())
