"""The ZeRO stages, one file each. `stage.py` is their base class; `build_stages.py` builds them."""
