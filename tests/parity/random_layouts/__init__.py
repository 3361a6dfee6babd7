"""Random command lines of `pretrain_gpt.py` against one process.

`python -m tests.parity.random_layouts --cases 300 --seed 1 --jobs 2` draws models and training
settings, runs each in one process and in several random layouts, and compares losses, every figure
of the log, validation losses and the weights after the last step. Exits with status 1 if a run
crashes, hangs, is refused without a fix, or differs; such a command line is made as small as it can
be and still fail, and printed. Refusals are counted by their text, for a person to judge.

A third of the cases compute as they are; in the others fp64 stands for fp32 and fp32 for bf16 and
fp16 (`wide`), so that rounding all but vanishes and tolerances are tight.

    --command "WORDS" --ranks N [--wide]    runs one command line, shrunk if it fails
    --former                                runs those that once failed (former_failures.txt)
"""
