"""GPUs and the fitted constants of the time model: one JSON file per GPU generation.

A file `constants/GENERATION.json` contains the data sheet of each GPU of the generation, and the
fitted constants with the source of each. `constants/software.json` contains the constants that
depend on the software era and not on the GPU.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.foundation.errors import ConfigError
from megatron_lattice.planner.workload import FloatArray, TextArray, Workloads

CONSTANTS = Path(__file__).parent / "constants"
SOFTWARE = "software"
_LIKE = {"lattice": "megatron"}
"""Kind of software -> the kind that it has all other constants of."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Data sheet of one kind of GPU; rates are dense and for one direction."""

    name: str
    generation: str
    peak_16_bit_flops: float
    peak_8_bit_flops: float
    peak_4_bit_flops: float
    memory_bytes: float
    memory_bytes_per_s: float
    nvlink_bytes_per_s: float
    nvlink_domain: float
    """GPUs that NVLink joins in the usual build, and the NIC of one of them, each way."""
    nic_bytes_per_s: float
    num_multiprocessors: float
    watts: float
    """Its power limit."""
    power: str = ""
    """Constants that scale the sustained rate of a card with another power limit, one for each
    precision; or empty."""


@dataclass(frozen=True)
class Prior:
    """Expected value of a constant, and the width of its prior in log."""

    value: float
    width: float
    """0: the constant is given and not fitted."""


@dataclass(frozen=True)
class Hardware:
    """GPUs by name and constants by dotted name, for example `hopper.gemm.fp8`."""

    gpus: Mapping[str, Gpu]
    constants: Mapping[str, float]
    priors: Mapping[str, Prior] = field(default_factory=dict)

    def with_constants(self, constants: Mapping[str, float]) -> Hardware:
        """Return the same GPUs with other constants."""
        return Hardware(self.gpus, {**self.constants, **constants}, self.priors)

    def constant(self, name: str) -> float:
        """Return a constant of the software."""
        return self.constants[f"{SOFTWARE}.{name}"]

    def per_software(self, name: str, workloads: Workloads) -> FloatArray:
        """Return a constant that has one value per kind of software, for each row."""
        kinds, which = workloads.kinds["software"]
        has_own = [f"{SOFTWARE}.{kind}.{name}" in self.constants for kind in kinds]
        known = [kind if own else _LIKE[kind] for kind, own in zip(kinds, has_own, strict=True)]
        return np.array([self.constant(f"{kind}.{name}") for kind in known])[which]


@dataclass(frozen=True, kw_only=True)
class RowHardware:
    """The hardware of each row of a table."""

    generation: TextArray
    peak_16_bit_flops: FloatArray
    peak_flops: FloatArray
    """Peak of matrix products in the precision of the row."""
    gemm_efficiency: FloatArray
    memory_bytes: FloatArray
    memory_bytes_per_s: FloatArray
    nvlink_bytes_per_s: FloatArray
    num_multiprocessors: FloatArray
    gemm_16_bit_efficiency: FloatArray
    attention_rate: FloatArray
    """Sustained FLOPs of a fused attention kernel."""
    power: FloatArray
    """Sustained rate of 16-bit products, relative to the usual power limit of the generation."""
    gemm_power: FloatArray
    """The same in the precision of the row."""


def rows_hardware(workloads: Workloads, hardware: Hardware) -> RowHardware:
    """Look up the GPU and the precision of each row.

    Raises:
        ConfigError: a GPU or a precision that no file of constants describes.
    """
    names, which = workloads.kinds["gpu"]
    gpus = [gpu_named(str(name), hardware) for name in names]
    precisions, precision = workloads.kinds["precision"]
    kinds = [_kind_of(str(name)) for name in precisions]
    programs, software = workloads.kinds["software"]

    def of_gpu(attribute: str) -> FloatArray:
        return np.array([getattr(gpu, attribute) for gpu in gpus], dtype=np.float64)[which]

    def constant_of(name: str) -> FloatArray:
        return np.array([hardware.constants[f"{gpu.generation}.{name}"] for gpu in gpus])[which]

    def power_of(kind: str) -> list[float]:
        return [hardware.constants.get(f"{gpu.generation}.{gpu.power}.{kind}", 1.0) for gpu in gpus]

    efficiency = np.ones((len(gpus), len(kinds)))
    for pair in np.unique(which * len(kinds) + precision):
        gpu, kind = divmod(int(pair), len(kinds))
        efficiency[gpu, kind] = _efficiency(gpus[gpu].generation, kinds[kind], hardware)
    bits = np.array([_BITS[kind] for kind in kinds])[precision]
    peak = np.select(
        [bits == 16, bits == 8],
        [of_gpu("peak_16_bit_flops"), of_gpu("peak_8_bit_flops")],
        of_gpu("peak_4_bit_flops"),
    )
    power = np.array(power_of("16bit"))[which]
    # PyTorch's own attention is a FlashAttention-2 that was written for Ampere; Megatron calls
    # the kernels of the GPU's generation (cuDNN, FlashAttention-3). FSDP models without a
    # gated feed-forward were published in 2023 and used FlashAttention-1.
    is_torch = (programs == "fsdp")[software]
    torch_kernel = np.where(
        workloads.gated_linear_unit > 0,
        constant_of("flash_attention_2"),
        constant_of("flash_attention_1"),
    )
    attention = np.where(is_torch, torch_kernel, constant_of("attention"))
    return RowHardware(
        generation=np.array([gpu.generation for gpu in gpus], dtype=str)[which],
        peak_16_bit_flops=of_gpu("peak_16_bit_flops"),
        peak_flops=peak,
        gemm_efficiency=efficiency[which, precision],
        memory_bytes=of_gpu("memory_bytes"),
        memory_bytes_per_s=of_gpu("memory_bytes_per_s"),
        nvlink_bytes_per_s=of_gpu("nvlink_bytes_per_s"),
        num_multiprocessors=of_gpu("num_multiprocessors"),
        gemm_16_bit_efficiency=constant_of("gemm.16bit"),
        attention_rate=of_gpu("peak_16_bit_flops") * attention * power,
        power=power,
        gemm_power=np.array([power_of(kind) for kind in kinds])[precision, which],
    )


_KINDS = {"fp16": "16bit", "bf16": "16bit", "fp8": "fp8", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}
_BITS = {"16bit": 16, "fp8": 8, "mxfp8": 8, "nvfp4": 4}


def _kind_of(precision: str) -> str:
    if precision not in _KINDS:
        raise ConfigError(
            f"precision {precision!r} is not known.",
            rule=f"a row computes in one of {', '.join(_KINDS)}",
            fix="name one of them in the column precision",
        )
    return _KINDS[precision]


def gpu_named(name: str, hardware: Hardware) -> Gpu:
    """Return a GPU by its longest matching name; A100-80GB-SXM is an A100.

    Raises:
        ConfigError: no file of constants describes it.
    """
    known = [known for known in hardware.gpus if name == known or name.startswith(f"{known}-")]
    if not known:
        raise ConfigError(
            f"GPU {name!r} is not known.",
            rule=f"the planner has constants of {', '.join(hardware.gpus)}",
            fix=f"name one of them, or add it to a file of {CONSTANTS.name}/",
        )
    return hardware.gpus[max(known, key=len)]


def _efficiency(generation: str, kind: str, hardware: Hardware) -> float:
    key = f"{generation}.gemm.{kind}"
    if key not in hardware.constants:
        raise ConfigError(
            f"{generation} GPUs have no constant for products in {kind}.",
            rule="each precision that a GPU computes in has a fitted efficiency",
            fix="plan with bf16, or calibrate with rows of this precision",
        )
    return hardware.constants[key]


@functools.cache
def load_hardware() -> Hardware:
    """Read all files of `constants/`."""
    gpus: dict[str, Gpu] = {}
    constants: dict[str, float] = {}
    priors: dict[str, Prior] = {}
    for path in sorted(CONSTANTS.glob("*.json")):
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for name, sheet in content.get("gpus", {}).items():
            gpus[name] = Gpu(name=name, generation=path.stem, **sheet)
        for name, constant in content["constants"].items():
            constants[f"{path.stem}.{name}"] = constant["value"]
            priors[f"{path.stem}.{name}"] = Prior(constant["prior"], constant["width"])
    return Hardware(gpus, constants, priors)


def save_constants(hardware: Hardware, obtained: str) -> None:
    """Write fitted constants into their files, each with the text `obtained`.

    Args:
        obtained: source of the constants, for example the fitted rows.
    """
    for path in sorted(CONSTANTS.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        for name, constant in content["constants"].items():
            if constant["width"] or name.startswith("interval."):
                constant["value"] = float(f"{hardware.constants[f'{path.stem}.{name}']:.6g}")
                constant["obtained"] = obtained
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    load_hardware.cache_clear()
