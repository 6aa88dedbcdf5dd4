"""Learning that diverges ends in one clear line, whatever the algorithm and whenever it happens."""

from pathlib import Path

import pytest

from ddrl.core.errors import NetworkError
from tests.run.test_resume import go_on, start


@pytest.mark.parametrize("algorithm", ["dqn", "c51", "r2d2"])
def test_it_names_loss_and_step_size_and_where_to_look(algorithm: str, tmp_path: Path) -> None:
    more = ["learner.lr=1e30", "learner.max_grad_norm=1e30", f"learner.algorithm={algorithm}"]
    run = start(tmp_path / f"diverged-{algorithm}", *(word for setting in more for word in ("--set", setting)))
    with pytest.raises(
        NetworkError, match=r"diverged: after .*last finite loss .*learner\.lr \(now .*huge rewards"
    ) as end:
        go_on(run, 2500)
    run.abandon(end.value)
    assert run.task.training.state.updates < 32, "found before the statistics of the next update are due"
    assert "\n" not in str(end.value)
