"""Count the bytes of live storages by kind, after every operation."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.training.setup.fake_device import device_of


class Kind(Enum):
    """Use of memory."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    COMMUNICATION = "communication"
    TEMPORARY = "temporary"


@dataclass
class _Alive:
    num_bytes: int
    kind: Kind
    layer: str
    storage: Any
    """Weak reference."""


@dataclass
class Peak:
    """The maximum number of bytes since the last `restart`, by kind."""

    num_bytes: int = 0
    kinds: dict[Kind, int] = field(default_factory=dict)
    during: str = ""
    """The operation that allocated the last bytes."""
    layer: str = ""


class MemoryTimeline(TorchDispatchMode):
    """A dispatch mode that counts every new storage until it is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        self.kinds: Counter[Kind] = Counter()
        self.layers: Counter[tuple[Kind, str]] = Counter()
        self.new_kind = Kind.TEMPORARY
        """Kind of new storages."""
        self.layer = ""
        """Layer that allocates new storages."""
        self.ignored_device = ""
        """Type of devices whose memory is not counted."""
        self.peak = Peak()
        self._alive: dict[int, _Alive] = {}
        self._resize: Callable[..., Any] | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, because disabling the compiler for every operation takes time."""
        return False

    def __enter__(self) -> Self:
        self._resize = torch.UntypedStorage.resize_
        timeline, resize = self, self._resize

        def counted(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            timeline._take(storage, "resize")
            return result

        torch.UntypedStorage.resize_ = counted  # type: ignore[method-assign,assignment]
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign,assignment]

    def __torch_dispatch__(
        self,
        func: Any,
        _types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation and count its new storages."""
        if func is torch.ops.prim.device.default:
            return device_of(args[0])
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            for tensor in tensors_in((args, kwargs)):
                self._reclassify(tensor, Kind.TEMPORARY, Kind.COMMUNICATION)
        for tensor in tensors_in(result):
            if self._counts(tensor):
                self._take(tensor.untyped_storage(), func)
        return result

    def _counts(self, tensor: Tensor) -> bool:
        return device_of(tensor).type != self.ignored_device

    def _take(self, storage: torch.UntypedStorage, cause: object) -> None:
        known, num_bytes = self._alive.get(id(storage)), storage.nbytes()
        if known is not None and known.storage() is storage:
            if known.num_bytes == num_bytes:
                return
            added = num_bytes - known.num_bytes
            known.num_bytes = num_bytes
        else:
            if num_bytes == 0:
                return
            key, added = id(storage), num_bytes
            known = _Alive(num_bytes, self.new_kind, self.layer, None)
            known.storage = weakref.ref(storage, lambda _: self._free(key))
            self._alive[key] = known
        self._add(known, added)
        if self.num_bytes > self.peak.num_bytes:
            self.peak = Peak(self.num_bytes, dict(self.kinds), str(cause), self.layer)

    def _free(self, key: int) -> None:
        known = self._alive.pop(key)
        self._add(known, -known.num_bytes)

    def _add(self, known: _Alive, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.kinds[known.kind] += num_bytes
        self.layers[known.kind, known.layer] += num_bytes

    def _reclassify(self, tensor: Tensor, old: Kind | None, new: Kind) -> None:
        known = self._alive.get(id(tensor.untyped_storage()))
        if known is not None and old in (None, known.kind):
            self._add(known, -known.num_bytes)
            known.kind = new
            self._add(known, known.num_bytes)

    def classify(self, tensors: Iterable[Tensor], kind: Kind) -> None:
        """Set the kind of the storages of tensors."""
        for tensor in filter(self._counts, tensors):
            self._take(tensor.untyped_storage(), "given")
            self._reclassify(tensor, None, kind)

    def reclassify_all(self, old: Kind, new: Kind) -> None:
        """Change the kind of all storages of one kind."""
        for known in self._alive.values():
            if known.kind is old:
                self._add(known, -known.num_bytes)
                known.kind = new
                self._add(known, known.num_bytes)

    def of_kind(self, kind: Kind) -> Counter[str]:
        """Return layer -> bytes of one kind that the layer allocated."""
        return Counter({layer: n for (each, layer), n in self.layers.items() if each is kind and n})

    def restart(self) -> None:
        """Restart the search for the peak."""
        self.peak = Peak(self.num_bytes, dict(self.kinds), "at its start", "")

    @contextmanager
    def making(self, kind: Kind) -> Iterator[None]:
        """Set the kind of new storages in this block."""
        before, self.new_kind = self.new_kind, kind
        try:
            yield
        finally:
            self.new_kind = before


def tensors_in(tree: object) -> list[Tensor]:
    """Return all tensors of a nested structure."""
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
