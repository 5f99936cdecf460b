"""bitsandbytes on the simulated card: its Python code runs unchanged; for its kernels see
`bitsandbytes_kernels.py`.

`quantize_model` replaces `from_pretrained(..., quantization_config=...)` when there are no weights to load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import TYPE_CHECKING, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor

from autofit.fakegpu.card import FakeGpu
from autofit.fakegpu.clock import MAIN
from autofit.fakegpu.errors import FakeGpuError
from autofit.fakegpu.patches.bitsandbytes_kernels import kernels_in_parts
from autofit.fakegpu.patches.redirect import untouched

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils.quantization_config import BitsAndBytesConfig

Target = tuple[object, str, object, str]


def bitsandbytes_modules(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """Quantised parameters as fake tensors: classes that are both, and a `_make_subclass` that returns them."""
    classes = {module.Params4bit: _also_fake(module.Params4bit), module.Int8Params: _also_fake(module.Int8Params)}
    original = cast("Callable[..., torch.Tensor]", untouched(torch.Tensor._make_subclass))

    def make_subclass(
        cls: type[torch.Tensor], data: torch.Tensor, requires_grad: bool = False, **options: object
    ) -> torch.Tensor:
        if cls not in classes or not isinstance(data, FakeTensor):
            return original(cls, data, requires_grad, **options)
        with torch.no_grad():
            made = data.detach()
        gpu.tracer.shadows.give(made, None)
        made.__class__ = classes[cls]
        made._is_param = True
        return made

    yield torch.Tensor, "_make_subclass", staticmethod(make_subclass), "torch refuses to subclass a fake tensor"
    gpu.tracer.in_parts.update(kernels_in_parts(gpu))


def bitsandbytes_functional(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: object = None) -> torch.Tensor:
        state = torch.empty(shape, dtype=dtype)
        state.is_paged = True  # type: ignore[attr-defined]
        state.page_deviceid = 0  # type: ignore[attr-defined]
        return state

    yield module, "get_paged", get_paged, "managed memory lives on the host and is not the allocator's"
    yield module, "prefetch_tensor", lambda *args, **kwargs: None, "managed memory is not simulated"
    yield module, "elementwise_func", lambda *args, **kwargs: None, "it fills managed memory through the CUDA library"
    yield module, "name2qmap", dict(module.name2qmap), "code tables made inside are fakes and must not stay"


_PAGED_NOTE = (
    "paged optimizer states take none of the allocator's memory, and each step moves them to the card and back; where "
    "the card has room for them, they stay there and the step is faster"
)


def paged_states(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """Charge the way of a parameter's paged states to the card and back, the worst case, at each step."""
    owner = module.Optimizer8bit

    def prefetch(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
        states = (optimizer.state[parameter].get(name) for name in ("state1", "state2"))
        paged = [state for state in states if getattr(state, "is_paged", False)]
        nbytes = sum(state.numel() * state.element_size() for state in paged)
        if nbytes:
            gpu.note(_PAGED_NOTE)
            copy = torch.ops.aten.copy_.default
            gpu.tracer.clock.link(copy, (parameter,), paged[0], nbytes=2 * nbytes, stream=MAIN, waits=False)

    yield owner, "prefetch_state", prefetch, "managed memory is not the allocator's"


def transformers_quantising(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """`from_pretrained` with a bitsandbytes config: an error if no layer is quantised (transformers only warns)."""
    original = cast("Callable[..., torch.nn.Module]", untouched(module.replace_with_bnb_linear))

    def replace(model: torch.nn.Module, *args: object, **kwargs: object) -> torch.nn.Module:
        plain = {id(layer) for layer in model.modules()}
        replaced = original(model, *args, **kwargs)
        if all(id(layer) in plain for layer in replaced.modules()):
            raise FakeGpuError(_NOTHING_TO_QUANTISE)
        return replaced

    yield module, "replace_with_bnb_linear", replace, "a request that changes nothing is an error"


_NOTHING_TO_QUANTISE = (
    "there is no linear layer to quantise (the output head and modules to skip do not count); drop load_in_4bit or "
    "load_in_8bit for this model"
)


def _also_fake(parameter_class: type[torch.Tensor]) -> type[torch.Tensor]:
    """A FakeTensor that passes `isinstance(..., Params4bit)`; dispatch is the fake's, methods are bitsandbytes'.

    It has the name too, by which accelerate, PEFT and TRL know 4-bit weights.
    """

    def make(cls: type[torch.Tensor], *args: object, **options: object) -> torch.Tensor:
        return parameter_class.__new__(parameter_class, *args, **options)

    body = {
        "__new__": make,
        "__torch_dispatch__": FakeTensor.__torch_dispatch__,
        "__torch_function__": torch._C._disabled_torch_function_impl,
    }
    return cast("type[torch.Tensor]", type(parameter_class.__name__, (FakeTensor, parameter_class), body))


def quantize_model(model: PreTrainedModel, quantization_config: BitsAndBytesConfig) -> PreTrainedModel:
    """Move the model to the card with its linear layers quantised one by one, as if loaded with that config."""
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.auto import AutoHfQuantizer

    originals = {name: module for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    quantizer = AutoHfQuantizer.from_config(quantization_config, pre_quantized=False)
    skipped = quantizer.get_modules_to_not_convert(model, quantization_config.llm_int8_skip_modules)
    replace_with_bnb_linear(model, modules_to_not_convert=skipped, quantization_config=quantization_config)
    replaced = [name for name in originals if type(model.get_submodule(name)) is not torch.nn.Linear]
    if not replaced:
        raise FakeGpuError(_NOTHING_TO_QUANTISE)
    for name in replaced:
        _fill(model.get_submodule(name), originals.pop(name))
    originals.clear()
    model.to("cuda")
    four = bool(quantization_config.load_in_4bit)
    model.config.quantization_config = quantization_config
    for flag, value in {
        "hf_quantizer": quantizer, "is_loaded_in_4bit": four, "is_loaded_in_8bit": not four, "is_quantized": True,
        "quantization_method": quantization_config.quant_method,
    }.items():  # fmt: skip
        setattr(model, flag, value)
    return model


def _fill(layer: torch.nn.Module, original: torch.nn.Linear) -> None:
    """Give a bitsandbytes layer, made on meta, the values of the replaced layer; moving it to the card quantises it."""
    old = layer._parameters["weight"]
    kept = {key: value for key, value in vars(old).items() if key in _PARAMETER_OPTIONS}
    weight = cast("torch.nn.Parameter", type(old)(original.weight.data, requires_grad=False, **kept))  # type: ignore[misc]
    if hasattr(weight, "quant_type"):
        weight.module = layer  # type: ignore[attr-defined]
    layer._parameters["weight"] = weight
    if original.bias is not None:
        layer._parameters["bias"] = torch.nn.Parameter(original.bias.data, requires_grad=False)


_PARAMETER_OPTIONS = {
    "blocksize", "compress_statistics", "quant_type", "quant_storage", "has_fp16_weights",
}  # fmt: skip
