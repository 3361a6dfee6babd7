"""`docs/status.md` is what `tests/status.py` writes, and its names exist."""

from benchmarks.gpu import layouts, paths
from tests.harness.pool import REPOSITORY
from tests.status import GROUPS, PAGE, page

FEATURES = [feature for group in GROUPS.values() for feature in group]


def test_the_page_is_as_it_is_written():
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.status"


def test_every_feature_names_a_test_and_checks_that_exist():
    known = {*layouts.LAYOUTS, *paths.PATHS}
    for feature in FEATURES:
        assert (REPOSITORY / feature.test).is_file(), feature
        assert set(feature.gpu) <= known, feature
