"""Two computations of one process that take turns."""

import pytest

from megatron.core.parameters.rng import rng_state
from megatron.core.step_context.overlap import overlap_forward_backward, yield_to_peer


def computation(name, num_waits, seen):
    """Note each piece of work; wait so many times in between."""

    def run():
        for piece in range(num_waits):
            seen.append(f"{name}{piece}")
            yield_to_peer()
        seen.append(f"{name} ends")

    return run


@pytest.mark.parametrize(
    ("waits", "expected"),
    [
        ((2, 2), ["a0", "b0", "a1", "b1", "a ends", "b ends"]),
        ((3, 1), ["a0", "b0", "a1", "b ends", "a2", "a ends"]),
        ((0, 2), ["a ends", "b0", "b1", "b ends"]),
    ],
)
def test_turns_change_at_every_wait_until_one_ends(waits, expected):
    seen = []
    overlap_forward_backward(*(computation(n, w, seen) for n, w in zip("ab", waits, strict=True)))
    assert seen == expected


def test_a_wait_outside_of_turns_is_nothing():
    seen = []
    computation("a", 2, seen)()
    assert seen == ["a0", "a1", "a ends"]


def test_turns_within_turns_are_one_after_the_other():
    seen = []
    inner = [computation(name, 1, seen) for name in "ab"]
    overlap_forward_backward(lambda: overlap_forward_backward(*inner), computation("c", 0, seen))
    assert seen == ["a0", "c ends", "a ends", "b0", "b ends"]


def test_each_draws_from_its_own_place():
    keys = {"a": [], "b": []}

    def draw(name):
        def run():
            with rng_state().in_scope(name):
                for _ in range(3):
                    keys[name].append(rng_state().next_key()[1:])
                    yield_to_peer()

        return run

    with rng_state().in_scope("outside"):
        overlap_forward_backward(draw("a"), draw("b"))
        assert rng_state().scope.path == ("outside",)
    assert keys == {name: [(name, call) for call in range(3)] for name in "ab"}


@pytest.mark.parametrize("fails_first", [True, False])
@pytest.mark.parametrize("num_waits", [0, 1, 3])
def test_an_error_of_either_ends_both_and_is_raised(fails_first, num_waits):
    seen = []

    def fail():
        computation("bad", num_waits, seen)()
        raise ValueError("broken")

    both = (fail, computation("good", 2, seen))
    with pytest.raises(ValueError, match="broken"):
        overlap_forward_backward(*(both if fails_first else reversed(both)))
    assert ("good ends" in seen) == (num_waits == 3)
    overlap_forward_backward(computation("x", 1, seen), computation("y", 1, seen))
    assert seen[-4:] == ["x0", "y0", "x ends", "y ends"]
