"""Pretrain a model with layers of several kinds: the script that launch lines for Megatron-LM call.

What a layer is made of is a setting (docs/sequence_mixers.md): `pretrain_gpt.py` does the same.
"""

from pretrain_gpt import main

if __name__ == "__main__":
    main()
