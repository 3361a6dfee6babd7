"""Activations in host memory: the same numbers, free device memory, one fetch."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.core.foundation.errors import ConfigError
from megatron.core.offload import saved_activations
from megatron.core.transformer.config.precision import OFFLOAD_MODULES
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.harness.tolerances import EXACT, assert_close
from tests.unit.models.test_residual_stream import KINDS, build, step

ON = {"fine_grained_activation_offloading": True, "min_offloaded_tensor_size": 1}
S, B, H, LAYERS = 8, 2, 32, 2


@pytest.mark.parametrize("options", [ON | {"offload_modules": list(OFFLOAD_MODULES)},
                                     {"cpu_offloading_num_layers": LAYERS,
                                      "min_offloaded_tensor_size": 1}], ids=str)  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_no_number_changes(kind, options):
    expected, found = step(build(kind)), step(build(kind, **options))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(found[name], value, EXACT, name)


class Recorded:
    """An offloaded tensor that records when it is fetched and taken."""

    def __init__(self, inner, events, storage):
        self.inner, self.events, self.storage, self.is_fetched = inner, events, storage, False

    def fetch(self):
        if not self.is_fetched:
            self.events.append(("fetch", self))
        self.is_fetched = True
        self.inner.fetch()

    def take(self):
        self.events.append(("take", self))
        self.is_fetched = False
        return self.inner.take()


class RecordedOffloader:
    def __init__(self):
        self.offload = saved_activations.offloader(torch.device("cpu"))
        self.tensors, self.events = [], []

    def __call__(self, tensor):
        offloaded = self.offload(tensor)
        offloaded.copied.result()
        storage = StorageWeakRef(tensor.untyped_storage())
        self.tensors.append(Recorded(offloaded, self.events, storage))
        return self.tensors[-1]


@pytest.fixture
def recorded(monkeypatch):
    offloader = RecordedOffloader()
    monkeypatch.setattr(saved_activations, "offloader", lambda device: offloader)
    return offloader


def forward(**options):
    model = build("llama", **options)
    ids = torch.randint(50, (B, S), generator=torch.Generator().manual_seed(2))
    return model, model(ids, None, None, labels=ids).mean()


def test_memory_of_the_device_is_free_after_forward(recorded):
    _, loss = forward(**ON, offload_modules=["qkv_linear", "core_attn", "attn_proj"])
    held = [offloaded for offloaded in recorded.tensors if not offloaded.storage.expired()]
    # Of each layer the norm of its input, query, key, value and output; a rotation of 8 positions,
    # which all layers read, stays.
    assert len(recorded.tensors) >= 5 * LAYERS
    assert held == []
    assert loss.isfinite()


def test_weights_and_small_tensors_stay(recorded):
    model, _ = forward(**ON | {"min_offloaded_tensor_size": S * B * H + 1},
                       offload_modules=["attn_norm", "qkv_linear", "attn_proj"])  # fmt: skip
    assert recorded.tensors == []
    assert any(p.numel() > S * B * H for p in model.parameters())


def test_all_but_the_first_is_on_its_way_when_backward_reads_it(recorded, monkeypatch):
    read = saved_activations._Saved.read

    def noted_read(saved):
        recorded.events.append(("read", saved.offloaded))
        return read(saved)

    monkeypatch.setattr(saved_activations._Saved, "read", noted_read)
    _, loss = forward(**ON, offload_modules=["attn_norm", "core_attn", "attn_proj", "mlp_norm"])
    loss.backward()
    events = recorded.events
    taken = [offloaded for what, offloaded in events if what == "take"]
    late = [p for p in taken if events.index(("fetch", p)) > events.index(("read", p))]
    assert late == taken[:1]
    assert len(taken) == len(recorded.tensors), "once, however many operations saved it"


def test_a_second_backward_fetches_again():
    model = build("llama", **ON, offload_modules=list(OFFLOAD_MODULES))
    loss = model(torch.arange(S)[None], None, None).square().mean()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters()]
    loss.backward()
    for parameter, grad in zip(model.parameters(), once, strict=True):
        assert_close(parameter.grad, 2 * grad, EXACT, "gradient")


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (ON, "offload_modules=\\[\\]"),
        (ON | {"offload_modules": ["mlp"]}, "offload_modules=\\['mlp'\\]"),
        (ON | {"offload_modules": ["attn_norm"], "cpu_offloading_num_layers": 1},
         "cpu_offloading_num_layers=1"),
        ({"cpu_offloading_num_layers": 1, "recompute_granularity": "selective",
          "recompute_modules": ["layernorm"]}, "with recomputation of layernorm"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_offloaded_is_refused(options, found):
    with pytest.raises(ConfigError, match=found):
        TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, **options)


@pytest.mark.parametrize("kind", ["llama", "experts", "latent"])
@pytest.mark.parametrize("granularity", ["selective", "full"])
def test_what_is_recomputed_is_not_kept_anywhere_and_no_number_changes(kind, granularity):
    modules = ["core_attn", "layernorm"]
    modules += {"latent": ["mla_up_proj"], "experts": ["moe_act", "shared_experts"]}.get(kind, [])
    whole = {"recompute_method": "uniform", "recompute_num_layers": 1}
    again = {"recompute_granularity": granularity} | (
        whole if granularity == "full" else {"recompute_modules": modules}
    )
    expected = step(build(kind))
    found = step(build(kind, **again, **ON, offload_modules=list(OFFLOAD_MODULES)))
    for name, value in expected.items():
        assert_close(found[name], value, EXACT, name)
