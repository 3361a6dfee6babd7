"""The undisturbed runs with which disturbed ones are compared."""

import signal

import pytest

from tests.faults.checks import References
from tests.faults.job import take_signals


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    former = signal.getsignal(signal.SIGINT)
    take_signals()
    yield References(tmp_path_factory.mktemp("references"))
    signal.signal(signal.SIGINT, former)
