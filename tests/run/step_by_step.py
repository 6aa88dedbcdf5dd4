"""`python -m ddrl.run` whose serial runs look at everything after each vector step and make each update by itself:
`python -m tests.run.step_by_step --serial SETTING...`."""

import sys
from typing import Any

from ddrl.learner.learner import Learner
from ddrl.run.__main__ import main
from ddrl.run.serial import SerialRun

if __name__ == "__main__":
    prepare = Learner.prepare

    def one_by_one(learner: Learner, source: Any, most: Any = None) -> Any:
        return prepare(learner, source)

    SerialRun._steps_at_once = lambda run: 1  # type: ignore[method-assign]
    Learner.prepare = one_by_one  # type: ignore[method-assign]
    sys.exit(main())
