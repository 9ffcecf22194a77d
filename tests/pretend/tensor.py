"""The pretend device's tensors: each wraps one of the processor's, and every operation on it comes through `__torch_dispatch__`."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests.pretend import streams
from tests.pretend.meter import METERS, Meter

NAME = "pretend"
CPU = torch.device("cpu")
_HERE = threading.local()
aten = torch.ops.aten
WAITING = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.item.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.unique_dim.default,
    aten._unique2.default,
    aten.repeat_interleave.Tensor,
}
"""Operations whose result the processor needs: it waits until the device has done all that came before."""
_LEAVES = {int, float, bool, type(None), str, torch.dtype, torch.device, torch.layout, torch.memory_format}
REFUSED = {aten.set_.source_Storage, aten.set_.source_Tensor, aten.resize_.default, aten.set_.default}


class PretendTensor(Tensor):
    """A tensor on a pretend device. `held` is what it holds; only this package looks at it."""

    held: Tensor
    made: streams.Made
    of_device: int
    """The number of its device."""

    @staticmethod
    def __new__(cls, inner: Tensor, index: int) -> PretendTensor:
        assert type(inner) is Tensor, type(inner)
        storage = inner.untyped_storage()
        key, meter = storage._cdata, METERS[index]
        try:
            meter.hold(key, storage.nbytes())
        except torch.OutOfMemoryError as error:
            if torch._C._current_autograd_node() is None:
                raise
            _HERE.late = torch.OutOfMemoryError(str(error))
            meter.hold(key, storage.nbytes(), anyhow=True)
        made: PretendTensor = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=torch.device(NAME, index),
        )
        made.held, made.made, made.of_device = inner, streams.noted(), index
        weakref.finalize(made, _ended, meter, key, inner)
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def record_stream(self, stream: Any) -> None:
        """Its memory is not given away before what is now on this stream is done."""
        self.made.record(stream)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, **_options: Any) -> str:  # type: ignore[override]
        return f"PretendTensor({list(self.shape)}, {self.dtype}, {self.device})"  # without a look at its values

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return dispatch(func, args, dict(kwargs or {}))


def _ended(meter: Meter, key: int, _inner: Tensor) -> None:
    """The storage lives until this has been noted, so that no other gets its key before."""
    meter.let_go(key)


def dispatch(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    _keep_backward_here()
    tensors = list[Tensor]()

    def unwrap(each: Tensor) -> Tensor:
        tensors.append(each)
        if not isinstance(each, PretendTensor):
            return each
        each.made.check_use()
        return each.held

    plain_args, plain_kwargs = mapped(args, unwrap), mapped(kwargs, unwrap)
    if func in REFUSED:
        raise NotImplementedError(f"the pretend device does not know {func}")
    if func in (aten.copy_.default, aten._foreach_copy_.default):
        return _copy_all(func, args, kwargs)
    if func is aten._to_copy.default:
        return _to_copy(args[0], **kwargs)
    index = _index_of(func, args, kwargs, tensors)
    if func in WAITING or (func is aten.index.Tensor and _selects(args[1])):
        METERS[index].wait(func.name().removeprefix("aten::"))
        streams.all_over()
    if "device" in kwargs:
        to = kwargs["device"]
        index = index if to is None else _number(to)
        plain_kwargs["device"] = CPU
        if to is not None and to.type != NAME:
            return func(*plain_args, **plain_kwargs)
    if plain_kwargs.get("pin_memory"):
        raise RuntimeError("only the processor's memory can be pinned")
    given = _counted(*plain_args) if func is aten.histc.default else func(*plain_args, **plain_kwargs)
    return _wrapped(func, args, kwargs, given, index)


def _counted(values: Tensor, *how: int) -> Tensor:
    """A histogram of integers, which a GPU knows and a processor does not."""
    return torch.histc(values.double(), *how).to(values.dtype)


def _keep_backward_here() -> None:
    """Have backward passes of this thread run on it. An error of Python in one ends the process: it is raised once that is over."""
    if not getattr(_HERE, "is_kept", False):
        torch._C._set_multithreading_enabled(False)
        _HERE.is_kept, _HERE.late = True, None
    late = _HERE.late
    if late is not None and torch._C._current_autograd_node() is None:
        _HERE.late = None
        raise late


def _unwrapped(tree: Any) -> Any:
    return mapped(tree, lambda each: each.held if isinstance(each, PretendTensor) else each)


def _tensors(tree: Any) -> list[Tensor]:
    """The tensors in an operation's arguments."""
    found = list[Tensor]()
    mapped(tree, found.append)
    return found


def mapped(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """What an operation takes or gives, with each tensor changed. torch's own walks over trees take longer than the operations of tests."""
    if type(tree) in _LEAVES:
        return tree
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: mapped(each, change) for key, each in tree.items()}
    if isinstance(tree, list):
        return [mapped(each, change) for each in tree]
    return tuple([mapped(each, change) for each in tree]) if isinstance(tree, tuple) else tree


@cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """The arguments that an operation changes: their positions and names. A schema takes longer to read than a small operation."""
    arguments = enumerate(func._schema.arguments)
    return tuple((number, each.name) for number, each in arguments if each.alias_info is not None and each.alias_info.is_write)


@cache
def _num_given(func: Any) -> int | None:
    """How many results an operation has that changes its arguments; None: it changes none."""
    return len(func._schema.returns) if func._schema.is_mutable else None


def _wrapped(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], given: Any, index: int) -> Any:
    """What an operation gives: what it changed, itself; anything else anew."""
    num_given = _num_given(func)
    if num_given is None:
        return mapped(given, lambda each: PretendTensor(each, index))
    changed = _changed(func, args, kwargs)
    if num_given == 1 and len(changed) == 1:
        if isinstance(changed[0], PretendTensor) and changed[0].shape != changed[0].held.shape:
            raise NotImplementedError(f"the pretend device does not know {func}, which changes a tensor's shape")
        return changed[0]
    if not num_given:
        return None
    if len(changed) == num_given:
        return tuple(changed)
    raise NotImplementedError(f"the pretend device does not know what {func} gives")


def _changed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    return [args[number] if number < len(args) else kwargs[name] for number, name in _written(func)]


def _index_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]) -> int:
    """The device of an operation's tensors. As on a GPU, one number of the processor may go with them, if it is only read."""
    found = {each.of_device for each in tensors if isinstance(each, PretendTensor)}
    others = [each for each in tensors if not isinstance(each, PretendTensor)]
    written = _tensors(_changed(func, args, kwargs)) if others else []
    if found and (any(each.dim() for each in others) or any(each is one for each in others for one in written)):
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {NAME} and cpu in {func}")
    if len(found) > 1:
        raise RuntimeError(f"Expected all tensors to be on the same device, but found two {NAME} devices in {func}")
    return found.pop() if found else _number(kwargs.get("device"))


def _number(device: torch.device | None) -> int:
    if device is None or device.type != NAME:
        return 0
    return device.index or 0


def _selects(indices: Sequence[Tensor | None]) -> bool:
    return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in indices)


def _copy_all(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    targets, sources = args[0], args[1]
    non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    for target, source in [(targets, sources)] if func is aten.copy_.default else zip(targets, sources, strict=True):
        copy(target, source, non_blocking=non_blocking)
    return targets if func is aten.copy_.default else None


def copy(target: Tensor, source: Tensor, *, non_blocking: bool) -> None:
    """Copy within a device, or between a device and the processor, and count it."""
    to, of = (each.device.index if isinstance(each, PretendTensor) else None for each in (target, source))
    plain_target, plain_source = _unwrapped((target, source))
    if to is not None and of is None:
        streams.check_source(source, non_blocking=non_blocking)
    if to is None and of is not None and non_blocking:
        streams.fetch(target, plain_source)
    else:
        plain_target.copy_(plain_source)
    if to == of:
        return
    if to is not None and of is not None:
        METERS[to].copied(source.nbytes, to_device=True)
        METERS[of].copied(source.nbytes, to_device=False)
        return
    index = to if to is not None else of
    assert index is not None
    METERS[index].copied(source.nbytes, to_device=to is not None)
    if not non_blocking:
        METERS[index].wait("copy to device" if to is not None else "copy to host")
        streams.all_over()


def _to_copy(
    source: Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    device = device or source.device
    if pin_memory and device.type == NAME:
        raise RuntimeError("only the processor's memory can be pinned")
    plain = _unwrapped(source)
    empty = torch.empty_like(plain, dtype=dtype or source.dtype, memory_format=memory_format or torch.preserve_format)
    if device.type == "meta":
        return empty.to("meta")
    target = PretendTensor(empty, _number(device)) if device.type == NAME else empty
    copy(target, source, non_blocking=non_blocking)
    return target
