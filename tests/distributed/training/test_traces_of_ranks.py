"""Profiles of four ranks of a real run, merged."""

from __future__ import annotations

from dataclasses import replace

from megatron.training.reports.trace_merge import find_traces, merge_traces, read_trace
from tests.harness.distributed import run_distributed
from tests.harness.trace_format import trace_problems
from tests.parity.training_run import train_with_flags

WORDS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 90"
    " --micro-batch-size 2 --global-batch-size 4 --train-iters 2 --lr 1e-2 --mock-data"
    " --num-workers 0 --eval-iters 0 --tensor-model-parallel-size 2"
    " --pipeline-model-parallel-size 2 --profile --profile-step-start 2 --profile-step-end 3"
    " --profile-ranks 0 1 2 3"
)
SHIFTS_NS = {0: 0, 1: 3_700_000_000, 2: -250_000_000, 3: 42_000}


def test_collectives_of_four_ranks_line_up_also_where_clocks_differ(tmp_path):
    words = [*WORDS.split(), "--tensorboard-dir", str(tmp_path)]
    run_distributed(train_with_flags, 4, words, timeout_s=120.0, tp=2, pp=2)
    traces = [read_trace(path) for path in find_traces(tmp_path)]
    merged = merge_traces(traces)
    assert list(trace_problems(merged.content)) == []
    aligned, number = merged.num_aligned()
    assert aligned == number >= 20
    groups = {each.group for trace in traces for each in trace.collectives}
    assert {"tp", "pp"} <= groups

    shifted = [
        replace(
            trace,
            base_ns=trace.base_ns + SHIFTS_NS[trace.rank],
            collectives=[
                replace(each, start_ns=each.start_ns + SHIFTS_NS[trace.rank],
                        end_ns=each.end_ns + SHIFTS_NS[trace.rank])
                for each in trace.collectives
            ],
        )
        for trace in traces
    ]  # fmt: skip
    again = merge_traces(shifted)
    assert again.num_aligned() == (number, number)
    for rank, shift in SHIFTS_NS.items():
        found = merged.offsets[rank].offset_ns - again.offsets[rank].offset_ns
        assert found == shift
