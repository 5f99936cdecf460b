"""Values of every tensor on the null GPU: after each operator the CPU's kernel runs on the same addresses.

Memory of a card is memory of the host here. So the CUDA build dispatches an operator and allocates its outputs, its
kernels compute nothing, and the CPU's kernel does in their place. An operator that the CPU cannot compute ends the
program with its name, and so does a kernel that is started outside of an operator.
"""

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_aten = torch.ops.aten
_RUNTIME = ctypes.PyDLL("libcudart.so.13")
_PLAIN = torch.Tensor.__torch_dispatch__  # of a class that dispatches nothing by itself
_MOVES = {"c10d", "_c10d_functional"}  # the null NCCL moves numbers between ranks by itself
_SHAPED_BY_VALUES = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
_BY_MASK = {_aten.index_put, _aten.index_put_, _aten._index_put_impl_, _aten._unsafe_index_put}  # a mask is made rows
_HOLDS_NOTHING = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}
_CHANGES_NO_VALUE = {_aten.set_, _aten.resize_, _aten.record_stream}


class CardValues(TorchDispatchMode):
    """Gives operators on CUDA tensors their values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, FakeTensor) for each in types):
            return func(*args, **kwargs or {})
        if any(each.__torch_dispatch__ is not _PLAIN for each in types):
            return NotImplemented  # a subclass: its own operators on plain tensors come here next
        if _RUNTIME.null_gpu_launched() != getattr(_computed, "kernels", 0):
            raise NotImplementedError(f"a kernel without values was started outside of an operator, before {func}")
        try:
            return _with_values(func, args, kwargs or {})
        finally:
            _computed.kernels = _RUNTIME.null_gpu_launched()


_computed = threading.local()  # kernels: those of this thread that were part of an operator


def start() -> None:
    """Give values to this thread, to all that start from now on, and to the threads of backward passes."""
    run = threading.Thread.run

    def with_values(self: threading.Thread) -> None:
        with CardValues():
            run(self)

    threading.Thread.run = with_values  # type: ignore[method-assign]
    here: Any = CardValues()
    here.__enter__()


def _with_values(func: Any, args: Any, kwargs: Any) -> Any:
    given = [each for each in tree_leaves((args, kwargs)) if _is_on_card(each)]
    if given and (_SHAPED_BY_VALUES.intersection(func.tags) or func.overloadpacket in _BY_MASK):
        answer = _on_host(func, args, kwargs)
        return args[0] if _changed(func) else tree_map(lambda each: _on_card(each, given[0].device), answer)
    out = func(*args, **kwargs)
    outs = tree_leaves(out)
    if not given and not any(map(_is_on_card, outs)):
        return out
    if func.is_view or func.namespace in _MOVES or func.overloadpacket in _HOLDS_NOTHING | _CHANGES_NO_VALUE:
        return out
    unwritten = set(range(len(outs))) - _changed(func)
    for i, (there, here) in enumerate(zip(outs, tree_leaves(_on_host(func, args, kwargs)), strict=True)):
        if i in unwritten and isinstance(there, torch.Tensor) and here is not None:
            if there.shape != here.shape:
                raise NotImplementedError(f"{func}: {there.shape} on the card, {here.shape} on the CPU")
            _shared(there).copy_(here)
    return out


def _is_on_card(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda


def _changed(func: Any) -> set[int]:
    """The outputs that are inputs: their values are written in place."""
    returned = func._schema.returns
    return {i for i, each in enumerate(returned) if each.alias_info is not None and each.alias_info.is_write}


def _on_host(func: Any, args: Any, kwargs: Any) -> Any:
    """The CPU's answer to the same call."""
    args, kwargs = tree_map(_host, args), tree_map(_host, kwargs)
    kwargs.pop("pin_memory", None)
    try:
        other = _OTHER_ON_CPU.get(func) or _OTHER_ON_CPU.get(func.overloadpacket)
        return (other or func)(*args, **kwargs)
    except (NotImplementedError, RuntimeError, TypeError) as error:
        raise NotImplementedError(f"{func} has no values on the null GPU: {error}") from error


def _host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _shared(value)
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return None if isinstance(value, torch.Generator) and value.device.type == "cuda" else value


def _shared(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the CPU on the memory of a CUDA tensor; another tensor as it is."""
    if not tensor.is_cuda:
        return tensor
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    whole = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(whole, tensor.storage_offset(), tensor.shape, tensor.stride())


def _on_card(value: Any, device: torch.device) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    found = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    _shared(found).copy_(value)
    return found


# -- operators that differ on the CPU. What only their backward reads has no values: it is computed again --------------


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, causal: bool,
    dropout_p: float, scale: float | None,
) -> Any:  # fmt: skip
    if dropout_p:
        raise NotImplementedError("attention's dropout draws other numbers on the CPU")
    return _aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=bias, scale=scale
    )


def _attention_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None,
    causal: bool, dropout_p: float, scale: float | None,
) -> Any:  # fmt: skip
    out, sums = _attention(query, key, value, bias, causal, dropout_p, scale)
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, out, sums, 0.0, causal, attn_mask=bias, scale=scale
    )


def _efficient(
    query: Any, key: Any, value: Any, bias: Any, sums: bool, dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None,
) -> Any:  # fmt: skip
    return _attention(query, key, value, bias, is_causal, dropout_p, scale)[0], None, None, None


def _efficient_backward(
    grad: Any, query: Any, key: Any, value: Any, bias: Any, out: Any, sums: Any, seed: Any, offset: Any,
    dropout_p: float, wanted: list[bool], is_causal: bool = False, *, scale: float | None = None,
) -> Any:  # fmt: skip
    if wanted[3]:
        raise NotImplementedError("the gradient of attention's bias")
    return *_attention_backward(grad, query, key, value, bias, is_causal, dropout_p, scale), None


def _flash(
    query: Any, key: Any, value: Any, dropout_p: float = 0.0, is_causal: bool = False, mask: bool = False, *,
    scale: float | None = None,
) -> Any:  # fmt: skip
    return _attention(query, key, value, None, is_causal, dropout_p, scale)[0], *[None] * 8


def _flash_backward(
    grad: Any, query: Any, key: Any, value: Any, out: Any, sums: Any, queries: Any, keys: Any, most_queries: int,
    most_keys: int, dropout_p: float, is_causal: bool, seed: Any, offset: Any, *, scale: float | None = None,
) -> Any:  # fmt: skip
    return _attention_backward(grad, query, key, value, None, is_causal, dropout_p, scale)


def _log_sigmoid(x: torch.Tensor) -> Any:
    return _aten.log_sigmoid_forward(x)[0], None


def _log_sigmoid_backward(grad: torch.Tensor, x: torch.Tensor, buffer: object) -> Any:
    return _aten.log_sigmoid_backward(grad, x, _aten.log_sigmoid_forward(x)[1])


_PRODUCTS = (_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm)


def _in_dtype(product: Any) -> Callable[..., Any]:
    """A product whose sums have a dtype of their own: the CPU's, of matrices in that dtype."""

    def computed(*args: Any, **kwargs: Any) -> Any:
        *matrices, dtype = args
        return product(*(each.to(dtype) for each in matrices), **kwargs)

    return computed


_OTHER_ON_CPU: dict[Any, Callable[..., Any]] = {
    _aten._scaled_dot_product_efficient_attention: _efficient,
    _aten._scaled_dot_product_efficient_attention_backward: _efficient_backward,
    _aten._scaled_dot_product_flash_attention: _flash,
    _aten._scaled_dot_product_flash_attention_backward: _flash_backward,
    _aten.log_sigmoid_forward: _log_sigmoid,
    _aten.log_sigmoid_backward: _log_sigmoid_backward,
    **{packet.dtype: _in_dtype(packet.default) for packet in _PRODUCTS},
    **{packet.dtype_out: _in_dtype(packet.out) for packet in _PRODUCTS},
}
