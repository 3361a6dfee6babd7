"""Build the optional native part of the data path; all else is declared in pyproject.toml.

Without a C compiler the installation goes on, and numpy does the same work more slowly.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "megatron.core.datasets._native",
            ["megatron/core/datasets/_native.c"],
            # Blends are defined in separately rounded double precision.
            extra_compile_args=["-O3", "-ffp-contract=off"],
            optional=True,
        )
    ]
)
