"""Commands on checkpoints: `python tools/checkpoint COMMAND --help`. See `__main__`."""
