"""Which test files start first where two workers share them."""

import pytest

LONGEST = (
    "tests/unit/gpu_machine/test_small_models.py",
    "tests/parity/test_context.py",
    "tests/unit/packaging/test_documents.py",
    "tests/distributed/models/test_examples.py",
    "tests/distributed/training/test_entry_point.py",
    "tests/parity/test_layouts.py",
    "tests/distributed/checkpointing/test_any_layout.py",
    "tests/distributed/training/test_pretraining.py",
    "tests/parity/test_random_layouts.py",
    "tests/change_it/test_change_it.py",
    "tests/distributed/hugging_face/test_adapters.py",
    "tests/parity/test_features.py",
    "tests/parity/test_experts.py",
    "tests/distributed/optimizer/test_streamed_state.py",
    "tests/gpu_without_gpu/test_steps.py",
    "tests/gpu_without_gpu/test_imaginary_accelerator.py",
)
"""Files of half a minute and more: at the end, one of them would leave a worker idle as long."""


def longest_first(items: list[pytest.Item]) -> None:
    """Move the tests of `LONGEST` to the front, and leave all others in their order."""
    places = {file: place for place, file in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))
