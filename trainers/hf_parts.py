"""Parts that are trained in place of a whole model: adapters, some layers, what is put beside; experts on the host."""

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from peft import PEFT_TYPE_TO_CONFIG_MAPPING
from torch import distributed
from transformers import TrainerCallback

from autofit.errors import ConfigError, quoted

_SOME_STEPS = 1000  # of AdaLoRA's schedule where the recipe does not say how many it trains


def other_adapter(lora: Any, given: Mapping[str, Any], *, total_steps: int) -> Any:
    """The config of another adapter of PEFT's on the modules that LoRA would have. Raises ConfigError."""
    options = dict(given)
    kind = str(options.pop("peft_type")).upper()
    known = {one.value: made for one, made in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    if kind not in known:
        raise ConfigError(f"peft_adapter: peft_type must be a type of PEFT's adapters; got {quoted(kind)}")
    common = {"task_type": lora.task_type, "target_modules": lora.target_modules,
              "modules_to_save": lora.modules_to_save}  # fmt: skip
    if kind == "ADALORA":
        common |= {"lora_alpha": lora.lora_alpha, "lora_dropout": lora.lora_dropout}
        options.setdefault("total_step", max(total_steps, _SOME_STEPS))
    try:
        return known[kind](**{**common, **options})
    except ImportError as error:  # PEFT's own sentence says what to install
        raise ConfigError(f"peft_adapter: {error}") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"peft_adapter: {kind} does not take these options: {error}") from error


class Allocates(TrainerCallback):  # type: ignore[misc]
    """AdaLoRA's ranks, which PEFT allocates anew after each step from sums that it keeps of each trained weight."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        model = more["model"]
        model.base_model.update_and_allocate(state.global_step + 1)


def freeze_all_but(
    model: Any,
    count: int,
    *,
    spread: bool,
    with_rest: bool = False,
    parts: Sequence[str] = (),
    extra: Sequence[str] = (),
) -> None:
    """Freeze `model` but for its last `count` layers, or for the last of each of `count` groups of layers.

    LLaMA-Factory's finetuning_type freeze, and its use_llama_pro (model/adapter.py): the first layers where `count` is
    negative, of each only the modules `parts`, and every weight whose name contains one of `extra`. `with_rest` freezes
    layers only, as LISA does (ms-swift's callbacks/lisa.py). Raises ConfigError.
    """
    _, layers = _layers(model)
    _check_modules(model, layers[0], parts, extra)
    for frozen in layers if with_rest else [model]:
        frozen.requires_grad_(False)
    number = len(layers)
    if spread and number % count:
        raise ConfigError(f"the {number} layers of the model must be a multiple of trainable_layers {count}")
    last = layers[-count:] if count > 0 else layers[:-count]
    for layer in layers[number // count - 1 :: number // count] if spread else last:
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(not parts or name.startswith(tuple(parts)))
    for name, parameter in model.named_parameters():
        if any(part in name for part in extra):
            parameter.requires_grad_(True)


def _check_modules(model: Any, layer: Any, parts: Sequence[str], extra: Sequence[str]) -> None:
    """Raise ConfigError for a name that LLaMA-Factory does not find: a layer's modules, and those outside of layers."""
    within = dict.fromkeys(name.partition(".")[0] for name, _ in layer.named_parameters())
    outside = dict.fromkeys(
        name.split(".")[-2] for name, _ in model.named_parameters() if not re.search(r"\.\d+\.", name)
    )
    for key, given, known in (("layer_modules", parts, within), ("extra_modules", extra, outside)):
        if missing := [name for name in given if name not in known]:
            raise ConfigError(
                f"{key} must be of {', '.join(known)} of this model; got {', '.join(missing)}"
                + (", which is the embedding itself, as the two are tied" if missing == ["lm_head"] else "")
            )


def checkpoint_trained_layers_alone(model: Any) -> None:
    """Let gradient checkpointing leave out layers of which nothing is trained, as LLaMA-Factory's own function does.

    They keep what their backward pass needs where something before them is trained (model_utils/checkpointing.py,
    `get_custom_gradient_checkpointing_func`).
    """
    frozen = [layer for layer in _layers(model)[1] if not any(p.requires_grad for p in layer.parameters())]
    set_all = model._set_gradient_checkpointing

    def set_trained(*given: Any, **options: Any) -> None:
        set_all(*given, **options)
        for layer in frozen:
            layer.gradient_checkpointing = False

    model._set_gradient_checkpointing = set_trained


def _layers(model: Any) -> tuple[str, list[Any]]:
    """(the name of the list of a model's layers, the layers)."""
    number = model.config.get_text_config().num_hidden_layers
    lists = ((n, m) for n, m in model.named_modules() if isinstance(m, torch.nn.ModuleList) and len(m) == number)
    name, found = next(lists)
    return name, list(found)


class _Rotation(torch.nn.Module):
    """pyreft's LowRankRotateLayer."""

    def __init__(self, hidden: int, rank: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(hidden, rank))
        torch.nn.init.orthogonal_(self.weight)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return torch.matmul(states.to(self.weight.dtype), self.weight)


class _Reft(torch.nn.Module):
    """Layer that LoReFT adds to the output of a layer (pyreft's LoreftIntervention), of all tokens."""

    def __init__(self, hidden: int, rank: int) -> None:
        super().__init__()
        self.rotate_layer = torch.nn.utils.parametrizations.orthogonal(_Rotation(hidden, rank))
        self.learned_source = torch.nn.Linear(hidden, rank).to(torch.bfloat16)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        rotated = self.rotate_layer(states)
        learned = self.learned_source(states.to(self.learned_source.weight.dtype))
        turned: Any = self.rotate_layer.weight  # made anew by the parametrization each time
        found = states + torch.matmul((learned - rotated).to(rotated.dtype), turned.T)
        return found.to(states.dtype)


def add_reft(model: Any, rank: int) -> None:
    """Freeze `model` and let LoReFT change each layer's output, a copy of which it reads (pyvene's hooks)."""
    model.requires_grad_(False)

    def change(layer: Any, _: Any, output: Any) -> Any:
        states = output[0] if isinstance(output, tuple) else output
        states[:] = layer.reft(states.clone())[:]
        return output

    for layer in _layers(model)[1]:
        layer.reft = _Reft(model.config.get_text_config().hidden_size, rank).to(next(layer.parameters()).device)
        layer.register_forward_hook(change)


class _Bottleneck(torch.nn.Module):
    """An MLP and an adapter behind it, in float32 (ms-swift's AdapterModule)."""

    def __init__(self, mlp: torch.nn.Module, hidden: int, width: int) -> None:
        super().__init__()
        self.mlp = mlp
        self.adapter = torch.nn.Sequential(
            torch.nn.Linear(hidden, width), torch.nn.GELU(), torch.nn.Linear(width, hidden)
        ).to(next(mlp.parameters()).device)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        found = self.mlp(states)
        own = found.to(torch.float32)
        added = self.adapter(own)
        return (own.to(added.dtype) + added).to(found.dtype)  # type: ignore[no-any-return]


def add_bottlenecks(model: Any, width: int) -> None:
    """Freeze `model` and put an adapter behind the MLP of every layer. Raises ConfigError."""
    model.requires_grad_(False)
    _, layers = _layers(model)
    if not all(isinstance(getattr(layer, "mlp", None), torch.nn.Module) for layer in layers):
        raise ConfigError("bottleneck needs layers with one mlp each; this model has others")
    for layer in layers:
        layer.mlp = _Bottleneck(layer.mlp, model.config.get_text_config().hidden_size, width)


def add_layers(model: Any, count: int) -> None:
    """Add a copy of the last of each of `count` groups of layers behind it, and freeze all but these.

    The copies add nothing at first, as ms-swift's LLaMA-Pro makes them (swift/tuners/llamapro.py). Raises ConfigError.
    """
    model.requires_grad_(False)
    name, layers = _layers(model)
    config = model.config.get_text_config()
    if len(layers) % count:
        raise ConfigError(f"the {len(layers)} layers of the model must be a multiple of added_layers {count}")
    each = len(layers) // count
    kinds = getattr(config, "layer_types", None)
    found, found_kinds = [], []
    for place, layer in enumerate(layers):
        new = [layer]
        if place % each == each - 1:
            new.append(copy.deepcopy(layer).requires_grad_(True))
            for part, module in new[1].named_modules():
                if part.endswith((".o_proj", ".down_proj")):
                    for parameter in module.parameters():
                        parameter.data.zero_()
        found += new
        found_kinds += [kinds[place]] * len(new) if kinds else []
    for place, layer in enumerate(found):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = place
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, torch.nn.ModuleList(found))
    config.num_hidden_layers = len(found)
    if kinds:
        config.layer_types = found_kinds


# -- experts in host memory -------------------------------------------------------------------------------------------
# As KTransformers has them under LLaMA-Factory. Read in kt-kernel 0.7.2: kt_kernel/sft/layer.py and autograd.py. The
# card holds everything but the routed experts and their adapters; hidden states go to the host and back, of several
# ranks by way of the first one.


class HostExperts(torch.nn.Module):
    """Module that stands on the card for the routed experts of a layer, which nothing moves out of host memory."""

    def __init__(self, experts: torch.nn.Module) -> None:
        super().__init__()
        self._held = [parameter.detach() for parameter in experts.parameters()]

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """(tokens, H) from the host. The values are not those of experts: nothing is trained with them."""
        found: torch.Tensor = _ByHost.apply(hidden, weights)  # type: ignore[no-untyped-call]
        return found


class _ByHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ctx.shape, ctx.kind = weights.shape, weights.dtype
        ctx.save_for_backward(hidden.new_empty(()))  # a checkpoint computes the layer again when it is read
        return _through_host(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert ctx.saved_tensors
        return _through_host(grads[0]), grads[0].new_zeros(ctx.shape, dtype=ctx.kind)


def _through_host(states: torch.Tensor) -> torch.Tensor:
    """States of the same shape from the host; the first of several ranks sends those of all, and shares them out."""
    ranks = distributed.get_world_size() if distributed.is_initialized() else 1
    if ranks > 1 and distributed.get_rank() == 0:
        gathered = [torch.empty_like(states) for _ in range(ranks)]
        torch.cat(gathered).cpu()
        del gathered
        whole = states.new_empty((ranks * len(states), *states.shape[1:]))
        parts = [part.contiguous() for part in whole.chunk(ranks)]
        found = torch.empty_like(states)
        del whole, parts
        return found
    return states.detach().cpu().to(states.device, copy=True)


def to_host(model: torch.nn.Module) -> None:
    """Replace the routed experts of each layer. Raises ConfigError where a model has none."""
    found = [
        (name, module)
        for name, module in model.named_modules()
        if type(module).__name__.endswith("Experts") and any(p.dim() == 3 for p in module.parameters(recurse=False))
    ]
    if not found:
        raise ConfigError("host_experts needs a mixture of experts; this model has none whose weights are one tensor")
    for name, module in found:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, HostExperts(module))


# Weights that FSDP2 shards as they are loaded.


def keep_dtype(accelerator: Any) -> None:
    """Let FSDP2 shard weights in their own dtype, as Axolotl's `fsdp2_prepare_model` (monkeypatch/accelerate/fsdp2.py).

    accelerate's function of that name casts those that are trained to float32 where it computes in 16 bits.
    """
    prepare, state = accelerator._prepare_fsdp2, accelerator.state

    def prepared(*parts: Any) -> Any:
        mixed, state._mixed_precision = state._mixed_precision, "no"
        try:
            return prepare(*parts)
        finally:
            state._mixed_precision = mixed

    accelerator._prepare_fsdp2 = prepared
