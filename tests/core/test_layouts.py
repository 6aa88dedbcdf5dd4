"""Rows and parameter vectors."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddrl.core.errors import CheckpointError
from ddrl.core.rows import ALIGNMENT, ParameterLayout, row_schema
from ddrl.core.specs import ArraySpec, EnvSpec

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@given(
    st.dictionaries(
        st.text(min_size=1), st.tuples(SHAPES, st.sampled_from(["float32", "float64", "int64", "uint8"])), max_size=6
    )
)
def test_tensors_are_aligned_disjoint_and_read_back(tensors):
    layout = ParameterLayout.of(tensors)
    end = 0
    for entry in layout.entries:
        assert entry.offset % ALIGNMENT == 0
        assert entry.offset >= end
        end = entry.offset + entry.nbytes
    assert layout.nbytes >= end
    vector = np.zeros(layout.nbytes, np.uint8)
    for value, view in enumerate(layout.views(vector).values()):
        view[...] = value
    for value, view in enumerate(layout.views(vector).values()):
        assert (view == value).all()
    assert ParameterLayout.from_json(layout.to_json()) == layout


def test_a_vector_of_another_network_is_refused():
    layout = ParameterLayout.of({"w": ((3,), "float32")})
    with pytest.raises(CheckpointError, match="another network"):
        layout.views(np.zeros(8, np.uint8))
    with pytest.raises(CheckpointError, match="manifest"):
        ParameterLayout.from_json(b"{]")


@given(st.lists(st.integers(1, 5), max_size=3).map(tuple), st.sampled_from(["uint8", "float32", "float64"]))
def test_rows_are_whole_words(shape, dtype):
    assert row_schema(EnvSpec("x", ArraySpec(shape, dtype), 2)).dtype.itemsize % 8 == 0


def test_only_the_newest_frame_travels():
    spec = EnvSpec("x", ArraySpec((4, 84, 84), "uint8"), 6, frame_stack=4)
    assert row_schema(spec).dtype["state"].shape == (84, 84)
    with pytest.raises(ValueError, match="stacked frames"):
        EnvSpec("x", ArraySpec((3, 84, 84), "uint8"), 6, frame_stack=4)


@pytest.mark.parametrize("dtype", ["9" * 5000 + "f4", "f4,f4", "(1000000,)f4", "float32;", ""])
def test_what_numpy_would_evaluate_is_no_name_of_a_dtype(dtype):
    with pytest.raises(ValueError, match="is no name of a dtype"):
        ArraySpec((2,), dtype)


@pytest.mark.parametrize("dtype", ["float32", "<f4", np.float32, np.dtype("f4")])
def test_a_dtype_is_kept_by_its_name(dtype):
    assert ArraySpec((2,), dtype).dtype == "float32"
