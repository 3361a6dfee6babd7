"""What is said of the kernels of a run is what its layers take."""

from dataclasses import replace

import pytest
import torch

from megatron.core.kernels.registry import KernelTable
from megatron.core.models.common.kernel_choices import kernel_choices
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnBackend
from tests.unit.models.test_gpt_model import make_model

S = 12
CASES = {
    "plain": {},
    "some layers have windows": {
        "num_layers": 3,
        "window_size": (4, 0),
        "window_attn_skip_freq": 3,
    },
    "dropout": {"attention_dropout": 0.1},
    "llama": {"family": "llama"},
    "llama, plain gate": {"family": "llama", "bias_activation_fusion": False},
    "capped": {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0},
    "sink": {"softmax_type": "learnable"},
    "fused loss": {"cross_entropy_loss_fusion": True},
    "asked": {"attention_backend": AttnBackend.unfused},
}


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_the_report_names_the_kernels_that_run(monkeypatch, name, has_documents):
    taken = {}
    choose = KernelTable.choose

    def recorded(self, *args):
        choice = choose(self, *args)
        taken.setdefault(self.operation, set()).add(choice.kernel.name)
        return choice

    model = make_model(**CASES[name])
    tokens = torch.randint(0, 13, (1, S))
    documents = PackedSeqParams(seq_idx=(torch.arange(S) // 5)[None])
    monkeypatch.setattr(KernelTable, "choose", recorded)
    model(
        tokens,
        torch.arange(S)[None],
        None,
        labels=tokens,
        packed_seq_params=documents if has_documents else None,
    ).sum().backward()
    found = dict(taken)
    taken.clear()
    for line in kernel_choices(model.config, "cpu", has_documents=has_documents):
        assert line.kernel in found[line.operation.partition(",")[0]], str(line)
    for operation, kernels in taken.items():
        assert kernels == found[operation], operation
    assert taken.keys() == found.keys() - {
        "softmax over the vocabulary",
        "cross entropy of rows",
        "sums into rows",
        "bias, dropout and residual",
        "rotary embedding",
        "rotary embedding of latent attention",
        "permutation of tokens",
        "rows at given places",
        "residual and norm",
    }


def test_layers_of_one_choice_share_a_line():
    model = make_model(num_layers=5, window_size=(4, 0), window_attn_skip_freq=2)
    assert attention_on_a_planned_gpu(replace(model.config, params_dtype=torch.bfloat16)) == [
        "attention, layers 1, 3, 5: flash-attn if installed, else transformer-engine if installed,"
        " else flex (sdpa does not support windows)",
        "attention, layers 2, 4: sdpa",
    ]


def attention_on_a_planned_gpu(config, **options):
    lines = kernel_choices(config, "cuda", is_planned=True, **options)
    return [str(line) for line in lines if line.operation.startswith("attention")]


@pytest.mark.parametrize("backend", [AttnBackend.auto, AttnBackend.flash])
def test_the_report_says_what_dropout_costs_or_gives_up(backend):
    config = make_model(attention_dropout=0.1, attention_backend=backend).config
    (line,) = attention_on_a_planned_gpu(replace(config, params_dtype=torch.bfloat16))
    if backend is AttnBackend.flash:
        assert line == (
            "attention: flash-attn if installed, else sdpa"
            " (the kernel draws dropout: the dropped elements depend on the layout)"
        )
    else:
        assert line == (
            "attention: unfused"
            " (sdpa, flash-attn, transformer-engine, flex, sdpa-mask: does not"
            " support dropout independent of the layout; with --attention-backend flash or fused"
            " the kernel draws dropout, by the layout)"
        )
    (line,) = attention_on_a_planned_gpu(config, backend="transformer_engine")
    assert line.endswith("(the kernel draws dropout: the dropped elements depend on the layout)")
