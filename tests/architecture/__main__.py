"""Print the figures, or the places that one of them counts."""

import sys
from dataclasses import dataclass

from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import positional
from tests.architecture import size
from tests.architecture.figures import FIGURES, tensor_functions


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What to print."""

    name: tuple[str, ...] = positional(())
    """A figure, to list its places; or `size`, for the lines of code and their pieces."""


def main() -> int:
    """Run the command."""
    name = " ".join(read_command_line(Flags, description=__doc__).name)
    if name == "size":
        print("\n".join(size.table()))
        return 0
    if name:
        if name not in FIGURES:
            print(f"no figure is called {name!r}; there are: {', '.join(FIGURES)}")
            return 2
        print("\n".join(FIGURES[name]()))
        return 0
    for name, places in FIGURES.items():
        print(f"{len(list(places())):5}  {name}")
    shapes = [has_shape for _, has_shape in tensor_functions()]
    print(f"{sum(shapes) / len(shapes):5.0%}  of {len(shapes)} tensor functions give shapes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
