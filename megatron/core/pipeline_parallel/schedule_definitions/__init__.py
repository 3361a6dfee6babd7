"""The pipeline schedules, one per file.

Each file defines the compute order of a schedule and registers the schedule. This module imports
every file of the folder, so a new schedule needs no other change.
"""

from __future__ import annotations

import importlib
import pkgutil

from megatron.core.foundation.errors import ScheduleError
from megatron.core.pipeline_parallel.schedule import SCHEDULES, Schedule

__all__ = ["SCHEDULES", "schedule_named"]

for _module in sorted(module.name for module in pkgutil.iter_modules(__path__)):
    importlib.import_module(f"{__name__}.{_module}")


def schedule_named(name: str) -> Schedule:
    """Return a registered schedule.

    Raises:
        ScheduleError: no schedule has this name.
    """
    if name not in SCHEDULES:
        raise ScheduleError(
            f"pipeline_schedule={name!r} is not known.",
            rule=f"schedules are {', '.join(SCHEDULES)}",
            flags=["--pipeline-schedule"],
            fix="use 1f1b, or register_schedule(...) your own",
        )
    return SCHEDULES[name]
