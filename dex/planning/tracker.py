"""Counts the memory and the products of what runs beneath it, tensor by tensor, without doing the arithmetic.

    with FakeTensorMode(), Tracker() as tracker:
        ...  # real code on fake tensors
    tracker.peak, tracker.flops

Every storage counts from the operation that makes it until the last reference to it is gone, as in a real run; what
an operation allocates and frees within itself is not seen.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

Kind = Literal["frozen", "trained", "gradients", "optimiser", "activations", "loss", "temporaries"]
KINDS: tuple[Kind, ...] = ("frozen", "trained", "gradients", "optimiser", "activations", "loss", "temporaries")

_aten = torch.ops.aten


def _cpu_attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> int:
    return sdpa_flop_count(q.shape, k.shape, v.shape)


def _cpu_attention_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> int:
    return sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape)


# torch's own table, FlopCounterMode's, has the GPU's attention only.
_ATTENTION: dict[Any, Any] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_attention_backward,
}


class Tracker(TorchDispatchMode):
    """Live bytes by kind, their peak, and floating point operations by dtype. Inside a FakeTensorMode.

    Where a value is asked for, which no fake tensor has: every position of a batch is a target, no probability is out
    of the ordinary, and a number is 0.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kind: Kind = "temporaries"  # of what is made from now on
        self.live: Counter[Kind] = Counter()
        self.peak: Counter[Kind] = Counter()  # what was live when most was
        self.most: Counter[Kind] = Counter()  # of each kind by itself
        self.flops: Counter[torch.dtype] = Counter()
        self._storages: dict[int, tuple[Kind, int]] = {}

    @contextmanager
    def making(self, kind: Kind) -> Iterator[None]:
        """What is made within the block is of this kind."""
        before, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = before

    def count_as(self, kind: Kind, tensors: Iterable[Tensor]) -> None:
        """Count the storages of these tensors under this kind from now on."""
        for tensor in tensors:
            self._add(tensor)
            key = tensor.untyped_storage()._cdata
            old, size = self._storages[key]
            self.live[old] -= size
            self.live[kind] += size
            self._storages[key] = (kind, size)
            self.most[kind] = max(self.most[kind], self.live[kind])

    def begin(self) -> None:
        """Forget the peak and the operations so far, not what is live."""
        self.peak, self.most = Counter(self.live), Counter(self.live)
        self.flops.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten.nonzero.default:
            out: Any = _nonzero(*args)
        elif func is _aten._local_scalar_dense.default:
            return 0.0 if args[0].is_floating_point() else 0
        else:
            out = func(*args, **kwargs)
        self._count(func.overloadpacket, args, kwargs, out)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        return out

    def _count(self, packet: Any, args: Any, kwargs: Any, out: Any) -> None:
        count = _ATTENTION.get(packet) or flop_registry.get(packet)
        if count is not None:
            first = next(leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
            self.flops[first.dtype] += count(*args, **kwargs, out_val=out)

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        size = storage.nbytes()
        self._storages[key] = (self.kind, size)
        weakref.finalize(storage, self._remove, key).atexit = False
        self.live[self.kind] += size
        self.most[self.kind] = max(self.most[self.kind], self.live[self.kind])
        if self.live.total() > self.peak.total():
            self.peak = Counter(self.live)

    def _remove(self, key: int) -> None:
        kind, size = self._storages.pop(key)
        self.live[kind] -= size


def _nonzero(values: Tensor) -> Tensor:
    """In a loss: all of a batch's positions are targets, [B, T − 1]; none of the rows [n] is out of the ordinary."""
    count = math.prod(values.shape) if values.ndim > 1 else 0
    return values.new_empty((count, values.ndim), dtype=torch.int64)
