import itertools

import numpy as np
import pytest

import ddrl
from ddrl.core.errors import MessageError
from ddrl.core.metrics import COLUMNS
from ddrl.core.roles import Role
from tests.waiting import ENDLESS, PATIENCE


def records(run, *, most=200):
    """What the live stream says, one record after the other."""
    with run.follow() as live:
        for _ in range(most):
            yield from (item for item in live.receive(timeout=PATIENCE) if hasattr(item, "series"))


def test_a_real_run_obeys_every_command_and_records_each(tmp_path):
    started = ddrl.start(
        {
            "env.num_envs": 2,
            "run.max_seconds": ENDLESS,
            "run.max_env_steps": 10**9,
            "run.target_return": 1e9,
            "evaluation.period": 0,
            "telemetry.period": 0.1,
        },
        root=tmp_path,
    )
    try:
        with started.attach() as run:
            steps = (record.series["env_steps"] for record in records(run))
            assert any(count > 0 for count in steps), "the run makes steps"
            run.pause()
            assert run.status()["paused"]
            held = run.status()["env_steps"]
            list(itertools.islice(records(run), 3))
            assert run.status()["env_steps"] == held
            run.resume()
            assert any(record.series["env_steps"] > held + 1 for record in records(run)), "the run goes on"
            assert run.set("learner.lr", 1e-4) == "set learner.lr = 0.0001: done"
            run.set("rollout.epsilon", 0.5)
            assert any(abs(record.series["epsilon"] - 0.5) < 1e-6 for record in records(run)), (
                "rollouts take the new epsilon"
            )
            run.set("replay.samples_per_insert", 4.0)
            with pytest.raises(MessageError, match="one host, so no model travels"):
                run.set("cluster.scheme", "direct")
            assert (tmp_path / run.checkpoint()["path"]).is_dir()
            run.stop()
        assert started.wait(PATIENCE) == "ended"
        with started.open() as tables:
            commands = tables.events(kinds=["command"])["text"].tolist()
            assert tables.state == "ended"
        assert commands[:5] == [
            "pause: done",
            "resume: done",
            "set learner.lr = 0.0001: done",
            "set rollout.epsilon = 0.5: done",
            "set replay.samples_per_insert = 4.0: done",
        ]
        assert "refused" in commands[5]
        assert commands[6:] == ["checkpoint: done", "stop: done"]
        assert started.summary["reason"] == "stopped from outside"
    finally:
        started.stop()


def test_the_scheme_changes_while_models_travel_and_every_plan_becomes_an_event(tmp_path):
    pytest.importorskip("mpi4py", reason="needs the extra [mpi]")
    settings = {
        "cluster.relays": 4,
        "cluster.scheme": "direct",
        "env.num_envs": 2,
        "learner.hidden": [16],
        "learner.batch_size": 16,
        "run.max_seconds": ENDLESS,
        "run.max_env_steps": 10**9,
        "run.target_return": 1e9,
        "evaluation.period": 0,
        "telemetry.period": 0.1,
    }
    started = ddrl.start(settings, ranks=9, root=tmp_path, wait=PATIENCE)

    def sealed(run, more):
        """Wait until every host has sealed so many versions more."""
        column = COLUMNS.index("versions_sealed")
        first = None
        for record in records(run):
            now = record.table[record.table[:, COLUMNS.index("role")] == list(Role).index(Role.RELAY), column][1:]
            now = np.nan_to_num(now)
            if len(now) < 3:  # a relay has not reported yet
                continue
            first = now if first is None else first
            if (now >= first + more).all():
                return True
        return False

    def plans():
        with started.open() as tables:
            return [fields["scheme"] for fields in tables.events(kinds=["plan"])["fields"]]

    try:
        with started.attach() as run:
            assert sealed(run, 3)
            assert any(plans() == ["direct"] for _ in records(run)), "the first plan"
            for scheme in ("chain", "sharded"):
                run.set("cluster.scheme", scheme)
                assert any(plans()[-1] == scheme for _ in records(run)), f"a plan of the scheme {scheme}"
                assert sealed(run, 3)
            with pytest.raises(MessageError, match="known are auto"):
                run.set("cluster.scheme", "carrier pigeons")
            run.stop()
        assert started.wait(PATIENCE) == "ended"
        assert plans() == ["direct", "chain", "sharded"]
        with started.open() as tables:
            fields = tables.events(kinds=["plan"])["fields"]
            assert [plan["shards"] for plan in fields] == [3, 1, 3]
            assert [plan["sources"] for plan in fields[:2]] == [[0, 0, 0], [0, 1, 2]]
            assert [plan["up"] + plan["down"] for plan in fields] == [[]] * 3  # these schemes measure no links
            assert started.summary["checksum_failures"] == 0
    finally:
        started.stop()
