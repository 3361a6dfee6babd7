"""The files that start first exist, and come in their order before all others."""

from types import SimpleNamespace

from tests.harness.order import LONGEST, longest_first
from tests.harness.pool import REPOSITORY


def test_the_files_that_start_first_exist():
    assert [file for file in LONGEST if not (REPOSITORY / file).is_file()] == []


def test_other_tests_keep_their_order_after_the_longest():
    names = ["tests/b.py::two", f"{LONGEST[1]}::x", "tests/b.py::one", f"{LONGEST[0]}::y[a::b]"]
    items = [SimpleNamespace(nodeid=name) for name in names]
    longest_first(items)
    assert [item.nodeid for item in items] == [names[3], names[1], names[0], names[2]]
