"""Values of 4 and 8 bits: bitsandbytes' weights and paged states, and torchao's optimizers."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple, cast

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from autofit.fakegpu.card import FakeGpu
from autofit.fakegpu.clock import MAIN
from autofit.fakegpu.patches.cuda_api import active_gpu
from autofit.fakegpu.patches.redirect import Target, untouched
from autofit.fakegpu.specs import FakeGpuError, GpuSpec
from autofit.fakegpu.tracer import charge_tensors

# bitsandbytes on the simulated card: its Python code runs unchanged, its operators as its CUDA backend runs them, with
# the same allocations and kernels in the same order.
#
# Follows bitsandbytes 0.50, `backends/cuda/ops.py` and, where CUDA has no implementation of its own,
# `backends/default/ops.py`, which is called itself.

OUTLIER_COLUMNS = 16  # per 8-bit matmul; data-dependent, a few on real models (LLM.int8() paper, section 4)
SIMT_ROWS = 4  # up to this many rows each version takes its fused kernel (_GEMM_4BIT_CUSTOM_FLOOR_M)
Fuses = Callable[[torch.dtype, int, int, int], bool]


def kernels_in_parts(gpu: FakeGpu) -> dict[OpOverload, Callable[..., object]]:
    """Operators of bitsandbytes that are several kernels on a card, with a function that runs these."""
    ops = torch.ops.bitsandbytes
    found: dict[OpOverload, Callable[..., object]] = {
        ops.int8_vectorwise_quant.default: functools.partial(_int8_quant, gpu),
        ops.int8_mm_dequant.default: functools.partial(_int8_dequant, gpu),
        ops.int8_linear_matmul.default: functools.partial(_int8_product, gpu),
    }
    for packet in (ops.int8_mixed_scaled_mm, ops.int8_scaled_mm, ops.int8_vectorwise_dequant):
        found[packet.default] = functools.partial(packet.default._op_dk, DispatchKey.CompositeExplicitAutograd)
    if hasattr(ops, "gemm_4bit"):
        found[ops.gemm_4bit.default] = functools.partial(_gemm_4bit, gpu, _fuses(gpu))
    return found


def _gemm_4bit(
    gpu: FakeGpu, fuses: Fuses, a: torch.Tensor, b: torch.Tensor, shape: Sequence[int], absmax: torch.Tensor,
    blocksize: int, quant_type: str, bias: torch.Tensor | None = None, absmax_8bit: torch.Tensor | None = None,
    absmax_code: torch.Tensor | None = None, absmax_offset: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """gemm_4bit: a fused kernel for few rows; for more, the weight in a's dtype and then a plain matrix product."""
    ops, launch = torch.ops.bitsandbytes, gpu.tracer.clock.operation
    inner = a.shape[-1]
    if inner % blocksize == 0 and fuses(a.dtype, a.numel() // inner, shape[0], inner):
        out = a.new_empty((*a.shape[:-1], shape[0]))
        scales = absmax_8bit if absmax_8bit is not None else absmax
        launch(ops.gemm_4bit.default, (a, b, shape, scales), {}, out)
        return out
    if absmax_8bit is not None and absmax_offset is not None:
        scales = torch.empty_like(absmax_8bit, dtype=torch.float32)
        launch(ops.dequantize_blockwise.out, (absmax_8bit, absmax, absmax_code), {}, scales)
        absmax = scales + absmax_offset
    weight = torch.empty(shape, dtype=a.dtype, device=a.device)
    launch(ops.dequantize_4bit.out, (b, absmax), {}, weight)
    return torch.nn.functional.linear(a, weight, bias)


def _fuses(gpu: FakeGpu) -> Fuses:
    """Predicate of the installed version: True if it runs its fused 4-bit kernel for a dtype and sizes M, N and K.

    Its CUDA backend cannot be imported without CUDA, so the function that chooses is taken out of its source.
    """
    choose = _function_that_chooses(gpu.spec)
    if choose is None:
        gpu.note("which 4-bit kernel this bitsandbytes takes is not known: the weight is dequantised for each product")
        return lambda dtype, rows, outer, inner: rows <= SIMT_ROWS
    limit, chosen = choose
    return lambda dtype, rows, outer, inner: rows <= limit and chosen(0, dtype, rows, outer, inner)


def _function_that_chooses(spec: GpuSpec) -> tuple[int, Callable[..., bool]] | None:
    package = find_spec("bitsandbytes")
    path = Path(package.origin or "").parent / "backends" / "cuda" / "ops.py" if package is not None else Path()
    if not path.is_file():
        return None
    major, minor = spec.compute_capability
    code, constants = _read(str(path), path.read_text())
    names = {**constants, "torch": torch, "_gpu_dispatch_props": lambda _: (spec.sm_count, major, minor)}
    exec(code, names)  # noqa: S102 - the library's own function
    limit, chosen = names.get("_gemm_4bit_custom_max_m"), names.get("_gemm_4bit_use_custom_cuda")
    known = {"_GEMM_4BIT_CUSTOM_FLOOR_M"} <= names.keys() and isinstance(limit, int) and inspect.isfunction(chosen)
    return (limit, chosen) if known else None  # type: ignore[return-value]


@functools.cache
def _read(path: str, source: str) -> tuple[CodeType, Mapping[str, object]]:
    """Code that defines the function that chooses, and the constants of its module; read once for many cards."""
    functions: list[ast.stmt] = []
    constants: dict[str, object] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name == "_gemm_4bit_use_custom_cuda":
            node.decorator_list = []
            functions.append(node)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    constants.setdefault(target.id, node.value.value)  # CUDA's comes before ROCm's
    return compile(ast.Module(functions, []), path, "exec"), constants


def _int8_quant(gpu: FakeGpu, a: torch.Tensor, threshold: float = 0.0) -> object:
    """int8_vectorwise_quant: int8 rows, their scales, and the outlier columns (a data-dependent number)."""
    rows = a.numel() // a.shape[-1]
    scales = torch.empty(rows, dtype=torch.float32, device=a.device)
    quantised = torch.empty(a.shape, dtype=torch.int8, device=a.device)
    columns = None
    if threshold > 0:
        outliers = a.abs() >= threshold
        bool(outliers.any())  # waits for the GPU
        outliers.any(dim=0)
        columns = torch.empty(OUTLIER_COLUMNS, dtype=torch.int64, device=a.device)
    op = torch.ops.bitsandbytes.int8_vectorwise_quant.default
    gpu.tracer.clock.operation(op, (a,), {}, (quantised, scales))
    if rows > 1 and columns is not None:
        quantised[:, columns] = 0
    return quantised, scales, columns


def _int8_product(gpu: FakeGpu, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """int8_linear_matmul: cuBLASLt's product of int8, in float32 unless the inner size is a multiple of 4."""
    out = torch.empty((*a.shape[:-1], b.shape[0]), dtype=torch.int32, device=a.device)
    if a.shape[-1] % 4:
        return out.copy_(torch.matmul(a.float(), b.float().t()).to(torch.int32))
    gpu.tracer.clock.operation(torch.ops.bitsandbytes.int8_linear_matmul.default, (a, b), {}, out)
    return out


def _int8_dequant(
    gpu: FakeGpu, a: torch.Tensor, row_stats: torch.Tensor, col_stats: torch.Tensor,
    dtype: torch.dtype | None = None, bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """int8_mm_dequant: float16 from the int32 product, then the wanted dtype."""
    out = torch.empty_like(a, dtype=torch.float16)
    op = torch.ops.bitsandbytes.int8_mm_dequant.default
    gpu.tracer.clock.operation(op, (a, row_stats, col_stats), {}, out)
    if bias is not None and bias.dtype is not torch.float16:
        out.add_(bias)
    return out.to(dtype or torch.float16)


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


# `optim: adamw_torch_8bit` and `adamw_torch_4bit`: torchao's optimizers, by the bytes of their states.
#
# Follows torchao 0.18 (`optim/adam.py`, `subclass_8bit.py`, `subclass_4bit.py`), and stands in for it whether it is
# installed or not: torchao compiles its step for each parameter, which on fakes would run eagerly, with every float32
# intermediate. Here a step is one kernel that reads its tensors and has no scratch, as the fused one.

_SMALLEST = 4096  # a parameter with fewer elements, or no whole number of blocks, keeps its moments whole
_CODES = {8: 256, 4: 16}  # entries of the table of codes
_NOTE = (
    "torchao's optimizer was simulated by its states: its compiled step is taken as one kernel for each parameter, "
    "without scratch"
)


class _LowBitAdamW(torch.optim.Optimizer):
    """AdamW whose moments are codes of `bits` bits, with a float32 scale for each block."""

    bits: int

    def __init__(self, params: Any, lr: float = 1e-3, *, block_size: int, **options: object) -> None:
        self.block_size = block_size
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, *map(_own, (parameter, parameter.grad)))
        return loss

    def _update(self, parameter: torch.Tensor, own: torch.Tensor, grad: torch.Tensor) -> None:
        state = self.state[parameter]
        if not state:
            for name in ("exp_avg", "exp_avg_sq"):
                state |= {f"{name}.{part}": made for part, made in self._moment(own).items()}
        gpu = active_gpu()
        assert gpu is not None
        clock = gpu.tracer.clock
        clock.operation(torch.ops.aten.addcdiv_.default, (own, grad, *state.values()), {}, own)

    def _moment(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Of a sharded parameter each rank has the moments of its own shard, and its size decides."""
        count = parameter.numel()
        if count < _SMALLEST or count % self.block_size:
            return {"whole": torch.zeros_like(parameter)}
        shape = parameter.shape if self.bits == 8 else (count * self.bits // 8,)
        return {
            "codes": parameter.new_zeros(shape, dtype=torch.uint8),
            "scale": parameter.new_zeros(count // self.block_size, dtype=torch.float32),
            "qmap": parameter.new_zeros(_CODES[self.bits], dtype=torch.float32),
        }


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of `tensor`: that of a DTensor, whose import takes half a second, or the tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else cast("torch.Tensor", to_local())


class AdamW8bit(_LowBitAdamW):
    bits = 8


class AdamW4bit(_LowBitAdamW):
    bits = 4


def transformers_optimizers(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """Let transformers' trainer take these in place of torchao's."""
    name = "_get_torchao_optimizer"
    if not hasattr(module, name):  # transformers before 5.20 has them in its trainer, and asks for the package
        return

    def choose(context: Any) -> tuple[type[torch.optim.Optimizer], dict[str, object]]:
        gpu.note(_NOTE)
        if find_spec("torchao") is None:
            gpu.note("torchao is not installed: a card without the package cannot run this optim")
        kind = AdamW4bit if "4bit" in str(context.args.optim).lower() else AdamW8bit
        chosen = {"block_size": int(context.optim_args.get("block_size", 256)), **context.adam_kwargs}
        context.optimizer_kwargs.update(chosen)
        return kind, cast("dict[str, object]", context.optimizer_kwargs)

    yield module, name, choose, "its compiled step is not simulated, and the package may lack"


# -- the host's time for bitsandbytes' Python --------------------------------------------------------------------------
#
# Measured with the CUDA build of torch 2.11 and bitsandbytes 0.50.2 without a card, in turns with a module's `train()`,
# of which 0.19 launches are charged (`autofit/fakegpu/tracer.py`): `python -m gpu.low_bit`, four runs within 10 %. The
# host of an H100 took 92 to 157 us for each of 290 tensors of AdamW8bit (experiments/gpu/h100-2/timeline.jsonl); this
# says 112 us with a host of 11.0 us a launch and 230 with one of 22.7, the two that were measured there.


class Product(NamedTuple):
    """Host time, in launches, that a product with a quantised weight takes beside those of its kernels."""

    forward: float
    recorded: float  # where a gradient is recorded
    backward: float


FOUR_BITS, FOUR_BITS_NESTED, EIGHT_BITS = Product(6.9, 10.9, 3.0), Product(7.9, 11.8, 3.7), Product(18.9, 18.9, 2.3)
# Launches a tensor that is updated, by whether its states are in 8 bits.
UPDATE = {True: 8.9, False: 6.8}
_WHY = "the host's time for bitsandbytes' Python"


def products(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """The forward of layers of 4 and 8 bits."""
    four = untouched(cast("Callable[..., torch.Tensor]", module.matmul_4bit))
    eight = untouched(cast("Callable[..., torch.Tensor]", module.matmul))

    def matmul_4bit(a: torch.Tensor, b: torch.Tensor, quant_state: Any, *args: object, **kw: object) -> torch.Tensor:
        _charge_forward(gpu, _of_four_bits(quant_state), a)
        return four(a, b, quant_state, *args, **kw)

    def matmul(a: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        _charge_forward(gpu, EIGHT_BITS, a)
        return eight(a, *args, **kwargs)

    return [(module, "matmul_4bit", matmul_4bit, _WHY), (module, "matmul", matmul, _WHY)]


def gradients(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """The backward of such layers."""
    for owner, cost in (
        (module.MatMul4Bit, lambda context: _of_four_bits(context.state)), (module.MatMul8bitLt, lambda _: EIGHT_BITS),
    ):  # fmt: skip
        yield owner, "backward", staticmethod(partial(_costly, gpu, untouched(owner.backward), cost)), _WHY


def updates(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """An optimizer's update of a tensor. The card is idle before it, as the host waited for it."""
    for owner in (module.Optimizer2State, module.Optimizer1State):
        yield owner, "update_step", partial(_updating, gpu, untouched(owner.update_step)), _WHY


def _of_four_bits(state: Any) -> Product:
    return FOUR_BITS_NESTED if state.nested else FOUR_BITS


def _charge_forward(gpu: FakeGpu, cost: Product, input_: torch.Tensor) -> None:
    is_recorded = torch.is_grad_enabled() and input_.requires_grad
    gpu.clock.host_work(cost.recorded if is_recorded else cost.forward)


def _costly(
    gpu: FakeGpu, original: Callable[..., object], cost: Callable[[Any], Product], context: Any,
    *gradients: torch.Tensor,
) -> object:  # fmt: skip
    gpu.clock.host_work(cost(context).backward)
    return original(context, *gradients)


def _updating(
    gpu: FakeGpu, original: Callable[..., object], optimizer: torch.optim.Optimizer, group: object, p: torch.Tensor,
    *place: object,
) -> object:  # fmt: skip
    is_low = optimizer.state[p]["state1"].dtype is torch.uint8
    charge_tensors(gpu.clock, gpu.layers, UPDATE[is_low], [p])
    return original(optimizer, group, p, *place)
