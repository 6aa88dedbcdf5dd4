import subprocess
import sys

import pytest

from ddrl.balance.__main__ import main


def test_the_dry_run_prints_the_sizes_of_a_set_of_nodes(capsys):
    assert main(["--total", "256", "--nodes", "100", "100", "50", "25"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[3] for row in rows[1:5]] == ["94", "93", "46", "23"]
    assert "63%" in " ".join(rows[5])


def test_the_dry_run_says_where_equal_sizes_are_fine(capsys):
    assert main(["--total", "256", "--nodes", "100", "101", "99"]) == 0
    assert "Equal sizes are fine" in capsys.readouterr().out


def test_memory_caps_what_a_fast_node_gets(capsys):
    memory = ["--memory", "1e9", "9e9", "--model-bytes", "5e8", "--sample-bytes", "1e7"]
    assert main(["--total", "100", "--nodes", "900", "100", "--overhead", "0", "0.1", *memory]) == 0
    assert [line.split()[3] for line in capsys.readouterr().out.splitlines()[1:3]] == ["50", "50"]


def test_speeds_follow_from_the_number_of_parameters(capsys):
    assert main(["--total", "100", "--nodes", "6e9", "18e9", "--parameters", "1e6"]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[1:3]] == ["1000", "3000"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--total", "1", "--nodes", "1", "1"], "below what 2 nodes"),
        (["--total", "9", "--nodes", "1", "nan"], "node 1: its speed"),
        (["--total", "9", "--nodes", "1", "1", "--max-size", "4"], "--max-size has 1 values for 2 nodes"),
        (["--total", "9", "--nodes", "1", "1", "--memory", "4", "4"], "needs --sample-bytes"),
        (["--total", "9", "--nodes", "1", "--memory", "4", "--sample-bytes", "9"], "not one sample"),
        (
            ["--total", "9", "--nodes", "1", "--memory", "99", "--sample-bytes", "9", "--max-size", "4"],
            "give one",
        ),
    ],
)
def test_nodes_that_cannot_share_the_batch_are_refused_with_the_reason(arguments, reason, capsys):
    assert main(arguments) == 1
    assert reason in capsys.readouterr().err


def test_it_is_a_command():
    done = subprocess.run(
        [sys.executable, "-m", "ddrl.balance", "--total", "8", "--nodes", "1", "3"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "iteration: 2 s" in done.stdout
