"""Print the settings, data, versions and tensors that differ between two checkpoints.

The exit status is 1 if any differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.dist_checkpointing.loader import Contents
from megatron.core.dist_checkpointing.object_store import storage_path
from megatron.core.settings.flags import positional
from tools.checkpoint.opening import PathFlags, data_of, opened, settings_of
from tools.checkpoint.state_digest import tensor_digests


@dataclass(frozen=True, kw_only=True)
class Flags(PathFlags):
    """Checkpoints to compare."""

    other: str = positional()
    """The second checkpoint."""
    contents: bool = False
    """Compare values as well."""


def run(flags: Flags) -> int:
    """Print the differences and return whether there are any."""
    both = [opened(storage_path(p)) for p in (flags.path, flags.other)]
    settings = [_settings_of(contents) for contents in both]
    num_found = 0
    for name in sorted(settings[0].keys() | settings[1].keys()):
        values = [s.get(name, "absent") for s in settings]
        if values[0] != values[1]:
            num_found += 1
            print(f"{name}: {values[0]!r} -> {values[1]!r}")
    kinds = [
        {key: (t.dtype, t.shape) for key, t in contents.manifest.tensors.items()}
        for contents in both
    ]
    for key in sorted(kinds[0].keys() | kinds[1].keys()):
        pair = [kind.get(key) for kind in kinds]
        if pair[0] != pair[1]:
            num_found += 1
            print(f"{key}: {pair[0] or 'absent'} -> {pair[1] or 'absent'}")
    if flags.contents:
        digests = [dict(tensor_digests(contents)) for contents in both]
        for key in sorted(digests[0].keys() & digests[1].keys()):
            if kinds[0][key] == kinds[1][key] and digests[0][key] != digests[1][key]:
                num_found += 1
                print(f"{key}: contents differ")
    print(f"{num_found} differences")
    return int(num_found > 0)


def _settings_of(contents: Contents) -> dict[str, Any]:
    state = contents.common_state()
    versions = contents.manifest.info.get("versions", {})
    known = {f"version of {name}": value for name, value in versions.items()}
    return settings_of(state) | data_of(state) | known
