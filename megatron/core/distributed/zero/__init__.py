"""The stages of ZeRO, one file each, and what they are made of.

`stage.py` is what all have in common, `build_stages.py` builds them for a model chunk.
"""
