"""The arguments that scripts add to their parsers."""

from __future__ import annotations

import argparse


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --deepspeed and --deepspeed_config, and return the parser."""
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="train with an engine")
    group.add_argument("--deepspeed_config", type=str, default=None, help="JSON file of settings")
    return parser
