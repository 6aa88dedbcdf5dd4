import contextlib
import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from ddrl.core.config import Config, TelemetryConfig
from ddrl.core.errors import ConfigError, MessageError, RunDirError
from ddrl.telemetry import ControlServer, Recorder, attach, control
from ddrl.telemetry.control import TOPIC, LiveReader, check_setting, receive_parts, secure_client
from ddrl.telemetry.directory import StatusFile, announce, read_live_file
from ddrl.telemetry.sinks import ProgressLine
from tests.telemetry.fake_cluster import FakeCluster
from tests.telemetry.feeding import CONFIG
from tests.waiting import PATIENCE


class Serving:
    """A control server polled by a thread of its own, as a trainer's loop would; remembers what it was told."""

    def __init__(self, run_dir, config=None, **handlers):
        self.events: list[tuple[str, str]] = []
        self.done: list[object] = []
        config = config or Config()

        def change(name, value):
            self.done.append((name, check_setting(config, name, value)))

        handlers = {
            "pause": lambda: self.done.append("pause"),
            "resume": lambda: self.done.append("resume"),
            "checkpoint": lambda: {"path": "checkpoints/000"},
            "stop": lambda: self.done.append("stop"),
            "set": change,
            "status": lambda: {"env_steps": 7},
        } | handlers
        self.server = ControlServer(
            run_dir, handlers, lambda kind, text, **fields: self.events.append((kind, text)), config.telemetry
        )
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.work)

    def work(self):
        while not self.ended.is_set():
            self.server.wait(0.02)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.ended.set()
        self.thread.join()
        self.server.close()


def test_every_command_is_done_acknowledged_and_recorded(tmp_path):
    with Serving(tmp_path) as serving, attach(tmp_path) as run:
        assert run.status() == {"env_steps": 7}
        assert run.pause() == "pause: done"
        assert run.resume() == "resume: done"
        assert run.checkpoint() == {"path": "checkpoints/000"}
        run.set("learner.lr", 0.002)
        run.set("replay.samples_per_insert", 4)
        run.set("rollout.epsilon", None)
        run.set("cluster.scheme", "direct")
        run.stop()
        assert run.state == "running"
    assert serving.done == [
        "pause",
        "resume",
        ("learner.lr", 0.002),
        ("replay.samples_per_insert", 4.0),
        ("rollout.epsilon", None),
        ("cluster.scheme", "direct"),
        "stop",
    ]
    assert ("command", "set learner.lr = 0.002: done") in serving.events
    assert len(serving.events) == 8  # asking for the status is no event


def test_an_impossible_value_is_refused_and_the_run_is_not_touched(tmp_path):
    with Serving(tmp_path) as serving, attach(tmp_path) as run:
        for name, value, words in (
            ("learner.lr", -1.0, r"learner\.lr .* must be above 0"),
            ("learner.batch_size", 4, "cannot be changed"),
            ("learner.lr", "fast", "wanted a number"),
            ("rollout.epsilon", 1.5, r"rollout\.epsilon .* at most 1"),
        ):
            with pytest.raises(MessageError, match=words):
                run.set(name, value)
        assert serving.done == []
        assert all("refused" in text for _, text in serving.events)


def test_a_command_of_the_wrong_type_is_answered_at_once(tmp_path):
    with Serving(tmp_path) as serving, attach(tmp_path) as run:
        for value in ([0.1], {"lr": 0.1}, True):
            with pytest.raises(MessageError, match=r"could not be read|wanted a number"):
                run.ask("set", name="learner.lr", value=value)
        assert serving.done == []


def test_the_words_of_a_command_are_text_in_the_terminal_and_for_who_asks(tmp_path, capsys):
    with Recorder(tmp_path, FakeCluster().table, CONFIG, sinks=[ProgressLine(CONFIG)]) as recorder:
        server = ControlServer(tmp_path, {}, recorder.record_event)
        serving = threading.Thread(target=server.wait, args=(PATIENCE,))
        serving.start()
        with attach(tmp_path) as run, pytest.raises(MessageError) as refused:
            run.ask("\x1b[31mred\x00\r\u202e")
        serving.join()
        server.close()
    said = capsys.readouterr().err
    for text in (said.replace("\n", ""), str(refused.value)):
        assert text.isprintable()
        assert "\\x1b[31mred\\x00" in text


def test_a_handler_that_fails_answers_with_its_words_and_the_server_goes_on(tmp_path):
    def broken():
        raise OSError("disk full")

    with Serving(tmp_path, checkpoint=broken) as serving, attach(tmp_path) as run:
        with pytest.raises(MessageError, match="disk full"):
            run.checkpoint()
        assert run.status() == {"env_steps": 7}
    assert serving.events[0][1] == "checkpoint: refused: OSError: disk full"


def test_messages_that_are_not_ours_are_dropped_and_noted_without_flooding(tmp_path):
    with Serving(tmp_path) as serving, attach(tmp_path) as run:
        context = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        secure_client(stranger, tmp_path, read_live_file(tmp_path).control_key)
        stranger.connect(serving.server.endpoint)
        for message in (
            [b"hello"],
            [TOPIC, b"{"],
            [TOPIC, b'{"id": 1, "command": "stop", "extra": 1}'],
            [b"", b"", b""],
            [b"x" * 100] * 7,
            [TOPIC, b'{"id": 1, "command": "st\xffop"}'],
            [TOPIC, b'{"id": 1, "command": "set", "arguments": {"name": "' + b"x" * 10_000 + b'"}}'],
            [TOPIC, b"[" * 60_000],
        ):
            stranger.send_multipart(message)
        stranger.send_multipart([TOPIC, b'{"id": 5, "command": "format_disk"}'])
        answers = [json.loads(stranger.recv_multipart()[1]) for _ in range(6)]  # what is of the protocol is answered
        assert [answer["id"] for answer in answers] == [0, 1, 1, 1, 0, 5]
        assert "there is no command" in answers[-1]["text"]
        assert all("could not be read" in answer["text"] for answer in answers[:-1])
        stranger.close(linger=0)
        context.term()
        assert run.status() == {"env_steps": 7}
    assert serving.done == []
    assert sum(kind == "alarm" for kind, _ in serving.events) == 4  # the 1st, 2nd, 4th and 8th of eight


def test_a_control_port_in_use_is_named(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        config = Config(telemetry=TelemetryConfig(control_port=other.getsockname()[1]))
        with pytest.raises(RunDirError, match=r"cannot listen on .* telemetry\.control_port = 0"):
            ControlServer(tmp_path, {}, lambda *args, **fields: None, config.telemetry)


def test_an_address_that_this_machine_lacks_is_blamed_on_no_port(tmp_path):
    telemetry = TelemetryConfig(bind="198.51.100.7")
    with pytest.raises(RunDirError, match=r"198\.51\.100\.7.*set telemetry\.bind to an address of this machine"):
        ControlServer(tmp_path, {}, lambda *args, **fields: None, telemetry)


def test_an_answer_that_is_not_a_runs_is_refused_in_plain_words(tmp_path):
    with zmq.Context() as context:
        stranger = context.socket(zmq.ROUTER)
        port = stranger.bind_to_random_port("tcp://127.0.0.1")
        live = {"pid": os.getpid(), "host": socket.gethostname(), "control": f"tcp://127.0.0.1:{port}"}
        (tmp_path / "live.json").write_text(json.dumps(live))
        answer = threading.Thread(
            target=lambda: stranger.send_multipart([stranger.recv_multipart()[0], b"HTTP/1.1 400 Bad Request"])
        )
        answer.start()
        with attach(tmp_path) as run, pytest.raises(MessageError, match="does another program use the port"):
            run.status()
        answer.join()
        stranger.close(linger=0)


def test_polling_an_idle_server_returns_at_once_without_work(tmp_path):
    with ControlServer(tmp_path, {}, lambda *args, **fields: None) as server:
        assert server.poll() == 0


def test_attaching_to_what_is_not_running_says_so(tmp_path):
    with pytest.raises(RunDirError, match="no run under"):
        attach(root=tmp_path)
    with pytest.raises(RunDirError, match="there is no run directory"):
        attach(tmp_path / "absent")
    with pytest.raises(RunDirError, match="is not running"):
        attach(tmp_path)
    live = {"pid": 4194305, "host": socket.gethostname(), "control": "tcp://127.0.0.1:1"}
    (tmp_path / "live.json").write_text(json.dumps(live))
    with pytest.raises(RunDirError, match="gone without a word"):
        attach(tmp_path)
    announce(tmp_path, control="tcp://*:1", stream="nonsense")
    with pytest.raises(RunDirError, match=r"live.json names the address 'tcp://\*:1'"):
        attach(tmp_path)
    with pytest.raises(RunDirError, match=r"live.json names the address 'nonsense'"):
        LiveReader(tmp_path)


def test_attaching_waits_for_a_trainer_that_has_announced_its_stream_and_not_yet_its_commands(tmp_path, monkeypatch):
    StatusFile(tmp_path)
    announce(tmp_path, stream="tcp://127.0.0.1:1")
    with contextlib.ExitStack() as stack:
        # Of this module alone: threads of other tests sleep, too.
        clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: stack.enter_context(Serving(tmp_path)))
        monkeypatch.setattr(control, "time", clock)
        with attach(tmp_path) as run:
            monkeypatch.undo()
            assert run.status()["env_steps"] == 7
    announce(tmp_path, stream="tcp://127.0.0.1:1")
    StatusFile(tmp_path).close()
    with pytest.raises(RunDirError, match="takes no commands"):
        attach(tmp_path)


def test_a_run_that_does_not_answer_is_given_up_with_a_reason(tmp_path):
    server = ControlServer(tmp_path, {}, lambda *args, **fields: None)
    with attach(tmp_path, timeout=0.1) as run, pytest.raises(MessageError, match="did not answer 'pause'"):
        run.pause()
    server.close()


def test_commands_over_an_encrypted_socket_need_the_key(tmp_path):
    config = Config(telemetry=TelemetryConfig(bind="0.0.0.0"))
    with Serving(tmp_path, config) as serving, attach(tmp_path) as run:
        assert run.status() == {"env_steps": 7}
        (tmp_path / "keys" / "client.secret").rename(tmp_path / "moved")
        with pytest.raises(RunDirError, match=r"client\.secret"):
            attach(tmp_path)
        assert serving.done == []


def test_a_copy_of_two_files_is_all_that_another_machine_needs(tmp_path):
    config = Config(telemetry=TelemetryConfig(bind="0.0.0.0"))
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    (elsewhere / "keys").mkdir(parents=True)
    with Serving(run, config):
        live = json.loads((run / "live.json").read_text())
        assert "0.0.0.0" in live["control"]
        live |= {"host": "another machine", "control": live["control"].replace("0.0.0.0", "127.0.0.1")}
        (elsewhere / "live.json").write_text(json.dumps(live))
        (elsewhere / "keys" / "client.secret").write_bytes((run / "keys" / "client.secret").read_bytes())
        with attach(elsewhere) as control:
            assert control.status() == {"env_steps": 7}


def test_settings_that_depend_on_each_other_are_checked_together():
    with pytest.raises(ConfigError, match="must cover one batch"):
        check_setting(Config(), "replay.samples_per_insert", 0.01)
    assert check_setting(Config(), "rollout.epsilon", 0.0) == 0.0


@pytest.mark.parametrize("name", ["learner.lr", "replay.samples_per_insert", "run.processes", "rollout.epsilon"])
@pytest.mark.parametrize("value", [1e308, math.inf, math.nan, -math.inf, -1, 10**400, True, "1", [1]])
def test_what_no_run_survives_is_refused_before_it_is_set(name, value):
    with pytest.raises(ConfigError, match=name):
        check_setting(Config(), name, value)


@pytest.mark.parametrize(
    ("name", "value"), [("learner.lr", 1.0), ("replay.samples_per_insert", 1e6), ("run.processes", 4096)]
)
def test_the_largest_values_that_a_live_change_may_set(name, value):
    assert check_setting(Config(), name, value) == value


def test_whoever_does_not_hold_the_runs_key_is_not_heard_on_loopback_either(tmp_path):
    with Serving(tmp_path) as serving, zmq.Context() as context:
        key = read_live_file(tmp_path).control_key.encode()
        public, secret = zmq.curve_keypair()
        plain, foreign = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
        foreign.curve_publickey, foreign.curve_secretkey, foreign.curve_serverkey = public, secret, key
        monitors = []
        for stranger in (plain, foreign):
            monitors.append(stranger.get_monitor_socket())
            stranger.set(zmq.LINGER, 0)
            stranger.connect(serving.server.endpoint)
            stranger.send_multipart([TOPIC, b'{"id": 1, "command": "stop"}'])
        refusals = {zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_DISCONNECTED}
        for monitor in monitors:
            events = iter(lambda monitor=monitor: recv_monitor_message(monitor)["event"], None)
            assert next(event for event in events if event in refusals | {zmq.EVENT_HANDSHAKE_SUCCEEDED}) in refusals
        with attach(tmp_path) as run:
            assert run.status() == {"env_steps": 7}
        for stranger, monitor in zip((plain, foreign), monitors, strict=True):
            stranger.disable_monitor()
            monitor.close()
            stranger.close()
        assert serving.done == []
        assert serving.events == []


def test_the_keys_of_a_run_are_its_owners_alone_and_damaged_ones_are_made_anew(tmp_path):
    (tmp_path / "keys").mkdir()
    for name in ("server.secret", "client.secret"):
        (tmp_path / "keys" / name).write_bytes(b"\xff\x00 no key")
    with Serving(tmp_path):
        assert {path.stat().st_mode & 0o777 for path in (tmp_path / "keys").glob("*.secret")} == {0o600}
        with attach(tmp_path) as run:
            assert run.status() == {"env_steps": 7}
        (tmp_path / "keys" / "client.secret").write_bytes(b"\xff\x00 no key")
        with pytest.raises(RunDirError, match="are damaged"):
            attach(tmp_path)


def test_a_message_of_too_many_parts_is_read_to_its_end_and_refused(tmp_path):
    with zmq.Context() as context, context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as other:
        one.bind("inproc://here")
        other.connect("inproc://here")
        other.send_multipart([b"x" * 100] * 1000)
        other.send_multipart([b"next"])
        assert receive_parts(one, 3, 1000) == []
        assert receive_parts(one, 3, 1000) == [b"next"]
        assert receive_parts(one, 3, 1000) is None
        other.send(b"x" * 1001)
        assert receive_parts(one, 3, 1000) == []


def test_damaged_live_files_are_as_good_as_none(tmp_path):
    for data in (b"", b"{", b"[" * 60_000, b'{"pid": "x"}', b"\xff\xfe", b'{"pid": 1, "host": "\xff"}', b"9" * 200_000):
        (tmp_path / "live.json").write_bytes(data)
        assert read_live_file(tmp_path) is None
        with pytest.raises(RunDirError, match="is not running"):
            attach(tmp_path)


def test_keys_that_came_with_a_folder_are_not_obeyed_and_own_ones_are_kept(tmp_path):
    """Whoever gave the folder has kept a copy of its keys."""
    run = tmp_path / "run"
    keys = run / "keys"
    private = tmp_path / "private"
    private.write_text("mine")
    (keys / "clients").mkdir(parents=True)
    (keys / "clients" / "another.key").write_text("a key")
    (keys / "clients" / "client.key").symlink_to(private)
    (keys / "server.secret").symlink_to(private)
    given = zmq.curve_keypair()[1]
    (keys / "client.secret").write_bytes(given)
    (keys / "client.secret").chmod(0o600)  # as an archive keeps it
    with Serving(run):
        pass
    made = [(keys / name).read_bytes() for name in ("server.secret", "client.secret")]
    assert given not in made
    assert [path.name for path in (keys / "clients").iterdir()] == ["client.key"]
    assert private.read_text() == "mine"
    with Serving(run):
        pass
    assert [(keys / name).read_bytes() for name in ("server.secret", "client.secret")] == made
    (keys / "clients" / "folder").mkdir()
    with pytest.raises(RunDirError, match=rf"{keys}/clients/folder cannot be removed"), Serving(run):
        pass


def test_a_process_that_can_open_no_more_files_is_told_so_and_lives(tmp_path):
    code = (
        "import os, resource, sys; from pathlib import Path; from ddrl.telemetry import ControlServer\n"
        "number = max(map(int, os.listdir('/proc/self/fd'))) + 8\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (number, number))\n"
        "try: ControlServer(Path(sys.argv[1]), {}, print)\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("RunDirError the sockets of a run need 24 open files more")
    assert "raise `ulimit -n`" in done.stdout
