"""Pretrain a model with state-space layers, under a script name of Megatron-LM.

A setting selects the parts of a layer (docs/sequence_mixers.md): `pretrain_gpt.py` does the same.
"""

from pretrain_gpt import main

if __name__ == "__main__":
    main()
