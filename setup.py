"""Build the optional native part of the data path; all else is declared in pyproject.toml.

Without a C compiler the installation continues, and numpy does the same work more slowly.
"""

import hashlib
from pathlib import Path

from setuptools import Extension, setup

SOURCE = "megatron/core/datasets/_native.c"

setup(
    ext_modules=[
        Extension(
            "megatron.core.datasets._native",
            [SOURCE],
            # Compared with the source before the library is used: see native.py.
            define_macros=[
                ("SOURCE_HASH", f'"{hashlib.sha256(Path(SOURCE).read_bytes()).hexdigest()}"')
            ],
            # Blends are defined in separately rounded double precision.
            extra_compile_args=["-O3", "-ffp-contract=off"],
            optional=True,
        )
    ]
)
