import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddrl.channels import Board, Counters
from ddrl.core.errors import ChannelError
from ddrl.core.metrics import COLUMNS


def test_fresh_counters_are_nan_and_count_from_zero(name):
    counters = Counters.create(name(), 3)
    assert counters.columns == COLUMNS
    assert counters.table().shape == (3, len(COLUMNS))
    assert np.isnan(counters.table()).all()
    counter = counters.row(1)["env_steps"]
    assert np.isnan(counter.value)
    counter.add(8)
    counter.add(0.5)
    table = Counters.attach(name()).table()
    assert table[1, COLUMNS.index("env_steps")] == 8.5
    assert np.isnan(np.delete(table.ravel(), len(COLUMNS) + COLUMNS.index("env_steps"))).all()


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from("ab"), st.booleans(), st.floats(-1e6, 1e6)), max_size=50))
def test_any_stores_agree_with_a_numpy_table(operations):
    counters = Counters.create(None, 3, ("a", "b"))
    rows = [counters.row(i) for i in range(3)]
    reference = np.full((3, 2), np.nan)
    for row, column, adds, x in operations:
        at = (row, "ab".index(column))
        if adds:
            rows[row][column].add(x)
            reference[at] = x if np.isnan(reference[at]) else reference[at] + x
        else:
            rows[row][column].set(x)
            reference[at] = x
        assert rows[row][column].value == reference[at]
    np.testing.assert_array_equal(counters.table(), reference)


def test_counters_of_a_process_that_ended_are_not_reported_until_the_next_one_counts_from_nothing():
    counters = Counters.create(None, 2, ("a", "b", "c"))
    for row in (counters.row(0), counters.row(1)):
        for name in counters.columns:
            row[name].set(7)
    counters.row(0).clear("b")
    np.testing.assert_array_equal(counters.table(), [[np.nan, 7, np.nan], [7, 7, 7]])
    counters.row(0)["a"].add(2)
    assert counters.row(0)["a"].value == 2


def test_changes_of_a_table_are_mirrored():
    counters = Counters.create(None, 2, ("a", "b", "c"))
    counters.change(np.arange(6), np.array([1, np.nan, 3, 4, 5, 6]))
    counters.change(np.array([1, 5]), np.array([2.0, np.nan]))
    counters.change(np.array([], int), np.array([]))
    np.testing.assert_array_equal(counters.table(), [[1, 2, 3], [4, 5, np.nan]])
    with pytest.raises(ValueError, match=r"are \(2, 3\), which has no place 6"):
        counters.change(np.array([0, 6]), np.array([0.0, 0.0]))
    assert counters.table()[0, 0] == 1


def test_a_table_is_a_copy():
    counters = Counters.create(None, 1, ("a",))
    counters.row(0)["a"].set(1)
    table = counters.table()
    counters.row(0)["a"].set(2)
    assert table[0, 0] == 1


def test_an_unknown_counter_or_row_is_named():
    counters = Counters.create(None, 2, ("a",))
    with pytest.raises(KeyError, match="no counter 'b'"):
        counters.row(0)["b"]
    with pytest.raises(IndexError, match=r"rows 0 \.\. 1, not 2"):
        counters.row(2)


def test_a_counter_outlives_the_table_it_belongs_to():
    counter = Counters.create(None, 1, ("a",)).row(0)["a"]
    counter.add(3)
    assert counter.value == 3


def test_counts_of_many_processes_are_all_seen(name, process):
    counters = Counters.create(name(), 3)
    code = (
        "import sys; from ddrl.channels import Counters\nrow = Counters.attach(sys.argv[1]).row(int(sys.argv[2]))\n"
        "steps = row['env_steps']\nfor _ in range(5000): steps.add(2)"
    )
    children = [process(code, name(), i) for i in range(3)]
    assert [child.wait() for child in children] == [0, 0, 0]
    assert counters.table()[:, COLUMNS.index("env_steps")].tolist() == [10_000.0] * 3


def test_a_segment_of_another_kind_is_refused(name):
    Counters.create(name(), 3)
    with pytest.raises(ChannelError, match="is a counters, not a board"):
        Board.attach(name())
