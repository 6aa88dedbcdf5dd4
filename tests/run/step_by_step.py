"""`python -m ddrl.run` whose serial runs end a turn after each vector step, have the shortest lane and make each update
by itself:
`python -m tests.run.step_by_step --serial SETTING...`."""

import sys
from typing import Any

from ddrl.learner.learner import Learner
from ddrl.run import serial
from ddrl.run.__main__ import main

if __name__ == "__main__":
    prepare = Learner.prepare

    def one_by_one(learner: Learner, source: Any, most: Any = None) -> Any:
        return prepare(learner, source)

    serial.ACT_SECONDS = 0.0
    serial.LANE_BYTES = 1
    Learner.prepare = one_by_one  # type: ignore[method-assign]
    sys.exit(main())
