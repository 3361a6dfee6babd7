"""The profiles of four ranks of a training run in one trace."""

from tests.harness.distributed import run_distributed
from tests.parity.training_run import train_with_flags
from tools.merge_traces import OF_RANK, merge_traces

WORDS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 90"
    " --micro-batch-size 2 --global-batch-size 4 --train-iters 2 --lr 1e-2 --mock-data"
    " --num-workers 0 --eval-iters 0 --tensor-model-parallel-size 2"
    " --pipeline-model-parallel-size 2 --profile --profile-step-start 2 --profile-step-end 3"
    " --profile-ranks 0 1 2 3"
)


def test_the_profiles_of_four_ranks_become_one_trace(tmp_path):
    words = [*WORDS.split(), "--tensorboard-dir", str(tmp_path)]
    run_distributed(train_with_flags, 4, words, timeout_s=120.0, tp=2, pp=2)
    merged = merge_traces(sorted(tmp_path.glob("**/trace-rank*.json")))
    assert {event["ph"] for event in merged["traceEvents"]} >= {"X", "M"}
    processes = {e["pid"] for e in merged["traceEvents"] if isinstance(e["pid"], int)}
    assert {pid // OF_RANK for pid in processes} >= {0, 1, 2, 3}
    steps = [e["pid"] // OF_RANK for e in merged["traceEvents"] if e.get("name") == "step 2"]
    assert sorted(set(steps)) == [0, 1, 2, 3]
