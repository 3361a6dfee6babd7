"""Log-probabilities of texts are the same in every layout, and those of the model's own loss."""

import torch

from megatron.core.utils import evaluating
from megatron.inference.evaluation import Row, score
from tests.distributed.inference.test_generate import VOCABULARY, tiny_gpt
from tests.harness.distributed import run_distributed
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close

ROWS = [
    Row([5, 17, 3, 80, 2]),
    Row([11, 9]),
    Row([80, 2, 2, 9, 41, 7, 7, 30, 12, 1, 0, 55], first_scored=9),
    Row(list(range(20, 41)), first_scored=4),
    Row([92, 92, 92]),
]


def scores(groups, num_chunks=1, sequence_parallel=False):
    model = tiny_gpt(groups, num_chunks, sequence_parallel)
    with evaluating(model):
        return score(model, ROWS, vocab_size=VOCABULARY, batch_size=2, groups=groups)


def from_logits(groups):
    (model,) = tiny_gpt(groups)
    found = []
    with evaluating(model), torch.no_grad():
        for tokens, first in ROWS:
            ids = torch.tensor([tokens])
            logs = model(ids, None, None)[0, :-1, :VOCABULARY].log_softmax(-1)
            own = logs.gather(1, ids[0, 1:, None]).squeeze(1)
            found.append((own[first - 1 :], logs.argmax(-1)[first - 1 :] == ids[0, first:]))
    return found


def test_every_layout_gives_the_scores_of_the_logits():
    (expected,) = run_distributed(from_logits, 1)
    for size, arguments, layout in (
        (1, (), {}),
        (4, (), {"tp": 2, "pp": 2}),
        (4, (1, True), {"tp": 2, "cp": 2}),
        (4, (2,), {"pp": 2, "vp": 2}),  # and two replicas
    ):
        for found in run_distributed(scores, size, *arguments, **layout):
            for one, (logs, greedy) in zip(found, expected, strict=True):
                what = f"log-probabilities with {layout}"
                assert_close(torch.tensor(one.logprobs), logs, FP32_REORDERED_SUM, what)
                assert one.is_greedy == greedy.tolist()
