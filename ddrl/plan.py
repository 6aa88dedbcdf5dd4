"""`python -m ddrl.plan` says where the predictions of earlier versions went."""

import sys

if __name__ == "__main__":
    print(
        "ddrl.plan went: measure a short run, or simulate a pool (ddrl.pool.simulator; docs/pool.md)", file=sys.stderr
    )
    sys.exit(2)
