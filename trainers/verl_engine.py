"""A model under FSDP as verl's engine has it: built, wrapped, moved between card and host, and stepped.

Read in verl at commit 1dda039b: verl/workers/engine/fsdp/transformer_impl.py and verl/utils/fsdp_utils.py. torch's own
FSDP1 or FSDP2 shards the real transformers model. Imports torch.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, cast
from unittest import mock

import torch
from torch import distributed
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp._runtime_utils import _lazy_init, _unshard
from torch.distributed.fsdp.wrap import _or_policy, lambda_auto_wrap_policy, transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor
from transformers.integrations import flash_attention
from transformers.modeling_flash_attention_utils import _flash_attention_forward

from autofit.fakegpu.patches.cuda_api import active_gpu

from .sequence import HEADS, TOKENS, Exchanged, Gathered
from .verl_losses import FusedLogProbs, entropy_in_chunks, entropy_of, row_log_probs

# Ulysses' sequence parallelism: a group of ranks has parts of the same packed samples, in attention of their heads.
#
# Read in verl at commit 1dda039b: verl/utils/ulysses.py and verl/models/transformers/monkey_patch.py. Imports torch.


class Ulysses:
    """One group of `size` ranks, which verl makes of neighbours; attention of transformers' flash kernels passes it.

    verl gathers the positions of all tokens in each layer, which happens here too; their values are those of `begin`,
    because on a simulated card the other ranks have none.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        own, ranks = distributed.get_rank(), distributed.get_world_size()
        self.rank = own % size
        self.group = [distributed.new_group(list(range(at, at + size))) for at in range(0, ranks, size)][own // size]
        self._data = [distributed.new_group(list(range(at, ranks, size))) for at in range(size)][self.rank]
        self._positions: torch.Tensor | None = None

    def count(self, device: torch.device) -> None:
        """The sum of a batch's tokens over the ranks with other samples, in a group of their own with its buffers."""
        distributed.all_reduce(torch.zeros((), device=device), group=self._data)

    def part(self, packed: torch.Tensor) -> torch.Tensor:
        """This rank's part of (1, tokens), which is padded to a multiple of the ranks."""
        return self._padded(packed).chunk(self.size, dim=1)[self.rank].contiguous()

    def whole(self, values: torch.Tensor, tokens: int) -> torch.Tensor:
        """The numbers of all `tokens` from each rank's part."""
        found: torch.Tensor = Gathered.apply(values, 0, self.group)  # type: ignore[no-untyped-call]
        return found[:tokens]

    def begin(self, positions: torch.Tensor) -> None:
        """The model computes tokens of these positions next, (1, tokens) of all ranks, forward and backward."""
        self._positions = self._padded(positions)

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Attention inside is of all tokens and a part of the heads, forward and where a backward repeats it."""
        with mock.patch.object(flash_attention, "_flash_attention_forward", self._attend):
            yield

    def _padded(self, packed: torch.Tensor) -> torch.Tensor:
        more = -packed.shape[1] % self.size
        return torch.nn.functional.pad(packed, (0, more)) if more else packed

    def _of_all_tokens(self, states: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = Exchanged.apply(states, HEADS, TOKENS, self.group)  # type: ignore[no-untyped-call]
        return found

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, query_length: int,
        position_ids: torch.Tensor, **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of this rank's tokens and all heads, (1, tokens / ranks, heads, width)."""
        key, value = (_repeated(states, self.size) for states in (key, value))
        query, key, value = (self._of_all_tokens(states) for states in (query, key, value))
        parts = [torch.empty_like(position_ids) for _ in range(self.size)]
        distributed.all_gather(parts, position_ids, group=self.group)
        gathered = torch.cat(parts, dim=-1)
        assert self._positions is not None
        assert gathered.shape == self._positions.shape
        found = _flash_attention_forward(
            query, key, value, *args, query_length=query.shape[TOKENS], position_ids=self._positions, **options
        )
        back: torch.Tensor = Exchanged.apply(found, TOKENS, HEADS, self.group)  # type: ignore[no-untyped-call]
        return back


def _repeated(states: torch.Tensor, ranks: int) -> torch.Tensor:
    """Keys or values with each head as often as lets every rank have one."""
    tokens, heads, width = states.shape[1:]
    times = ranks // heads
    if times <= 1:
        return states
    return states[:, :, :, None].expand(1, tokens, heads, times, width).reshape(1, tokens, heads * times, width)


_LOGITS = "logits"  # of the model itself, among what a pass returns
DTYPES = {"fp32": torch.float32, "float32": torch.float32, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16}


class Engine:
    """One model of a worker: the actor, or with `forward_only` the reference, whose shards wait in host memory."""

    def __init__(
        self, model: torch.nn.Module, *, version: int, reshards: bool, dtype: torch.dtype, device: torch.device,
        forward_only: bool = False, defers_sync: bool = True, prefetches: bool = False, fused: bool = False,
        compiles: bool = True, chunk: int | None = None, recomputes_entropy: bool = False, sharers: int = 1,
        reduce_dtype: torch.dtype = torch.float32, offloads: bool = False,
    ) -> None:  # fmt: skip
        self.version, self.device, self.dtype = version, device, dtype
        self.entropy_dtype = dtype if chunk is None else torch.float32
        self._reduce_dtype = reduce_dtype
        self._forward_only, self._defers_sync, self._fused = forward_only, defers_sync, fused
        self._offloads = offloads or forward_only  # FSDP2's own: shards, gradients and the optimizer in host memory
        self._recomputes_entropy = recomputes_entropy
        self._loss_before: torch.Tensor | None = None
        entropy: Callable[[torch.Tensor], torch.Tensor] = (
            entropy_of if chunk is None else partial(entropy_in_chunks, chunk=chunk)
        )
        self._entropy = torch.compile(entropy, dynamic=True) if compiles else entropy
        ranks = torch.distributed.get_world_size()
        mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("fsdp",))
        self._ulysses = Ulysses(sharers) if sharers > 1 else None
        whole: Any = model
        self._plain: Any = whole.get_base_model() if hasattr(model, "get_base_model") else model
        wrap = self._flat if version == 1 else self._fully
        self.module = wrap(model, mesh, reshards=reshards, prefetches=prefetches)
        self.optimizer: torch.optim.Optimizer | None = None

    # ------------------------------------------------------------------ sharding
    def _flat(self, model: torch.nn.Module, mesh: Any, *, reshards: bool, prefetches: bool) -> torch.nn.Module:
        """FSDP1, one flat parameter a layer; the reference's is offloaded by torch's own policy."""
        names = set(getattr(model, "_no_split_modules", None) or ())
        layers = {type(module) for module in model.modules() if type(module).__name__ in names}
        policies: list[Any] = [partial(transformer_auto_wrap_policy, transformer_layer_cls=layers)]
        if any(not parameter.requires_grad for parameter in model.parameters()) and not self._forward_only:
            policies.insert(0, partial(lambda_auto_wrap_policy, lambda_fn=_is_trained_leaf))
        precision = fsdp.MixedPrecision(
            param_dtype=self.dtype, reduce_dtype=self._reduce_dtype, buffer_dtype=torch.float32
        )
        return FullyShardedDataParallel(
            model, auto_wrap_policy=partial(_or_policy, policies=policies), device_mesh=mesh,
            device_id=torch.cuda.current_device() if self.device.type == "cuda" else self.device,
            sharding_strategy=ShardingStrategy.FULL_SHARD if reshards else ShardingStrategy.SHARD_GRAD_OP,
            mixed_precision=precision, forward_prefetch=prefetches, use_orig_params=False,
            cpu_offload=fsdp.CPUOffload(offload_params=True) if self._forward_only else None,
        )  # fmt: skip

    def _fully(self, model: torch.nn.Module, mesh: Any, *, reshards: bool, prefetches: bool) -> torch.nn.Module:
        """FSDP2: the layers, the embedding and the head where they do not share weights, and the rest."""
        tied = bool(getattr(model.config, "tie_word_embeddings", False))
        names = set(getattr(model, "_no_split_modules", None) or ())
        apart = () if tied else ("embed_tokens", "lm_head")
        wrapped = [
            module for name, module in model.named_modules()
            if type(module).__name__ in names or name.rpartition(".")[2] in apart
        ]  # fmt: skip
        policy = fsdp.MixedPrecisionPolicy(
            param_dtype=self.dtype, reduce_dtype=self._reduce_dtype, cast_forward_inputs=True
        )
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": reshards}
        if self._offloads and self.device.type == "cuda":
            options["offload_policy"] = fsdp.CPUOffloadPolicy(pin_memory=True)
        for module in (*wrapped, model):
            fsdp.fully_shard(module, **options)
        if prefetches:
            for module, after in pairwise(wrapped):
                cast(Any, module).set_modules_to_forward_prefetch([after])
        return model

    @contextmanager
    def _syncing(self, *, last: bool) -> Iterator[None]:
        """Gradients are reduced in the last micro-batch of a step only, unless the config says otherwise."""
        if last or not self._defers_sync:
            yield
        elif self.version == 1:
            with cast(Any, self.module).no_sync():
                yield
        else:
            module = cast(Any, self.module)
            module.set_requires_gradient_sync(False)
            try:
                yield
            finally:
                module.set_requires_gradient_sync(True)

    def take(self, *, fused: bool, defers_sync: bool, checkpoints: bool) -> None:
        """Compute so from here on."""
        if fused != self._fused:
            fuse_head(self._plain) if fused else unfuse_head(self._plain)
        self._fused, self._defers_sync = fused, defers_sync
        model = self._plain
        if checkpoints != model.is_gradient_checkpointing:
            if checkpoints:
                checkpointed(model)
            else:
                model.gradient_checkpointing_disable()

    @torch.no_grad()
    def gather_root(self) -> None:
        """Gather what is in no layer, which FSDP1 keeps from the first pass without gradients to the last."""
        root = cast(Any, self.module)
        if self.version == 2:
            return
        _lazy_init(root, root)
        if root._handle is not None:
            _unshard(root, root._handle, root._unshard_stream, root._pre_unshard_stream)
            root._device_handle.current_stream().wait_stream(root._unshard_stream)

    def shard_root(self) -> None:
        """Let go of it, as a backward does."""
        if self.version == 1 and (handle := cast(Any, self.module)._handle) is not None:
            handle.reshard(True)

    # ------------------------------------------------------------------ card and host
    def load_model(self) -> None:
        self._move_model(self.device)

    def offload_model(self) -> None:
        self._move_model(torch.device("cpu"))
        empty_cache()

    @torch.no_grad()
    def _move_model(self, to: torch.device) -> None:
        if self.version == 2:
            self.module.to(to, non_blocking=True)
            return
        root = cast(Any, self.module)
        _lazy_init(root, root)
        for handle in root._all_handles:
            handle.flat_param_to(to, non_blocking=True)
            handle.flat_param._local_shard = handle.flat_param.data

    @torch.no_grad()
    def move_optimizer(self, to: torch.device) -> None:
        for state in self.optimizer.state.values() if self.optimizer is not None else ():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[key] = value.to(to, non_blocking=True)

    def without_adapters(self) -> AbstractContextManager[Any]:
        """Context in which the model computes as it was before LoRA."""
        found: AbstractContextManager[Any] = self._peft().disable_adapter()
        return found

    def merged_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The same with the adapters merged into the weights, of which the host has a copy until they are restored.

        merged_lora_context; FSDP1 gathers the whole model to merge.
        """
        from peft.tuners.lora import LoraLayer

        adapters = [module for module in self.module.modules() if isinstance(module, LoraLayer)]
        ours = [(n, p) for n, p in self.module.named_parameters() if self.version == 1 or "lora" not in n]
        kept = {name: parameter.data.clone().cpu() for name, parameter in ours}
        with self._whole(writeback=True):
            for adapter in adapters:
                adapter.merge()
        for name, whole in self.whole_weights(without="lora_"):
            yield name, whole.to(torch.bfloat16)
        for name, parameter in ours:
            parameter.data.copy_(kept[name].to(parameter.device))
        for adapter in adapters:
            adapter.merged_adapters = []

    def whole_weights(self, *, without: str | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor) of what is given to the rollout engine, a tensor at a time."""
        with self._sharded():
            state = self.module.state_dict()
        for name, parameter in state.items():
            if without is not None and without in name:
                continue
            on_card = parameter.to(self.device, non_blocking=True)
            yield name, on_card.full_tensor() if isinstance(on_card, DTensor) else on_card

    def send_adapters(self) -> None:
        """Gather the adapters to host memory; FSDP1 gathers the whole model for it (collect_lora_params)."""
        from peft import get_peft_model_state_dict

        with self._whole(), self._sharded():
            found = get_peft_model_state_dict(self._peft()).values()
            sent = [(each.full_tensor() if isinstance(each, DTensor) else each).detach().cpu() for each in found]
        empty_cache()
        del sent

    def send_base(self) -> None:
        """Gather the weights below the adapters to host memory, once, as verl's engine starts without them.

        verl moves the model to the host and back meanwhile; under FSDP1 both are of the whole model.
        """
        base = self._peft().base_model.model
        with self._whole():
            base.to("cpu")
            base.to(self.device)
        empty_cache()

    def _peft(self) -> Any:
        return getattr(self.module, "_fsdp_wrapped_module", self.module)

    def _whole(self, *, writeback: bool = False) -> AbstractContextManager[Any]:
        """Context in which each rank has all weights of FSDP1's model; with `writeback` its share is kept of them."""
        if self.version == 2:
            return nullcontext()
        found: AbstractContextManager[Any] = FullyShardedDataParallel.summon_full_params(
            self.module, writeback=writeback
        )
        return found

    def send_adapters_by_layer(self) -> None:
        """Gather the adapters to host memory, one sharded module at a time (layered_summon_lora_params)."""
        for name, module in cast(Any, self.module).named_modules():
            flat = isinstance(module, FullyShardedDataParallel)
            if not name or not (flat or isinstance(module, fsdp.FSDPModule)):
                continue
            nested = [f"{n}." for n, m in module.named_modules() if n and isinstance(m, type(module)) and flat]
            if not any("lora_" in n and not n.startswith(tuple(nested)) for n, _ in module.named_parameters()):
                continue
            if flat:
                module._is_root = True
            with FullyShardedDataParallel.summon_full_params(module, writeback=False) if flat else nullcontext():
                for parameter_name, parameter in module.named_parameters():
                    if "lora_" in parameter_name and not parameter_name.startswith(tuple(nested)):
                        (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().cpu()
            if flat:
                module._is_root = False
            empty_cache()

    def _sharded(self) -> AbstractContextManager[Any]:
        """Context in which FSDP1's state dict has each rank's share."""
        if self.version == 2:
            return nullcontext()
        kind, settings = fsdp.StateDictType.SHARDED_STATE_DICT, fsdp.ShardedStateDictConfig()
        found: AbstractContextManager[Any] = FullyShardedDataParallel.state_dict_type(self.module, kind, settings)
        return found

    # ------------------------------------------------------------------ computing
    def log_probs(self, batch: dict[str, torch.Tensor], *, entropy: bool, training: bool) -> dict[str, torch.Tensor]:
        """Log-probabilities, and with `entropy` the entropy, of each packed token: forward_step's part of the model.

        The model's own logits are held as long as they are.
        """
        inputs, labels, temperature = self._prepared(batch)
        with self._autocast():
            told = self._own_log_probs(inputs, labels[0], temperature[0], entropy=entropy, training=training)
        if self._ulysses is None:
            return told
        tokens, numbers = batch["input_ids"].shape[1], [name for name in told if name != _LOGITS]
        return told | {name: self._ulysses.whole(told[name], tokens) for name in numbers}

    def _prepared(self, batch: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
        """(the model's inputs, the next tokens, a temperature for each token), (1, tokens) of this rank.

        verl makes them for each of its models (prepare_model_inputs).
        """
        ids, positions = batch["input_ids"], batch["position_ids"]
        made = [ids, positions, torch.roll(ids, shifts=-1, dims=1), torch.ones(ids.shape, device=ids.device)]
        if self._ulysses is not None:
            self._ulysses.begin(positions)
            made = [self._ulysses.part(values) for values in made]
        return {"input_ids": made[0], "position_ids": made[1]}, made[2], made[3]

    def _own_log_probs(
        self, inputs: dict[str, torch.Tensor], labels: torch.Tensor, temperature: torch.Tensor, *, entropy: bool,
        training: bool,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """The same of the tokens that this rank computes."""
        if self._fused:
            found, entropies = self.module(**inputs, use_cache=False, shift_labels=labels)
            return {"log_probs": found, **({"entropy": entropies} if entropy else {})}
        own = self.module(**inputs, use_cache=False).logits
        logits = own.squeeze(0)
        logits = logits / temperature.clamp(min=1e-8).unsqueeze(-1).to(logits.dtype)
        told: dict[str, torch.Tensor] = {_LOGITS: own}
        if entropy and self._recomputes_entropy:
            told["entropy"] = torch.utils.checkpoint.checkpoint(self._entropy, logits, use_reentrant=False)
        elif entropy:
            told["entropy"] = self._entropy(logits)
        told["log_probs"] = row_log_probs(logits, labels, inplace=training and not entropy)
        return told

    def values(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """A number for each packed token from a model with a value head."""
        inputs, *_held = self._prepared(batch)
        with self._autocast(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # of views that are written to: none is
            found: torch.Tensor = self.module(**inputs, use_cache=False).logits.squeeze(0).squeeze(-1)
        return found if self._ulysses is None else self._ulysses.whole(found, batch["input_ids"].shape[1])

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(device_type=self.device.type, dtype=self.dtype)

    def attending(self) -> AbstractContextManager[None]:
        """Context in which the model computes, forward and backward."""
        return nullcontext() if self._ulysses is None else self._ulysses.attending()

    def count(self) -> None:
        """The sum of a batch's tokens, before its micro-batches; in the group of all ranks it has no bytes."""
        if self._ulysses is not None:
            self._ulysses.count(self.device)

    def backward(self, loss_of: Callable[[], torch.Tensor], *, last: bool) -> None:
        """Forward and backward of one micro-batch.

        verl has the loss of the one before until there is another. Its graph has no more than the leaves, of which LoRA
        makes the embedding's output one, with a gradient.
        """
        with self._syncing(last=last), self.attending():
            loss = loss_of()
            self._loss_before = None if last else loss
            float(loss.detach())
            loss.backward()

    def clip(self, most: float) -> None:
        """Clip the norm of the gradients, as verl does before the optimizer."""
        if self.version == 1:
            norm = cast(Any, self.module).clip_grad_norm_(most)
        else:
            from torch.nn.utils.clip_grad import _clip_grads_with_norm_, _get_total_norm

            parameters = [p for p in self.module.parameters() if p.grad is not None]
            norm = _get_total_norm([p.grad for p in parameters if p.grad is not None])
            norm = norm.to(self.device, non_blocking=True)
            _clip_grads_with_norm_(parameters, most, norm)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        float(norm)


def _is_trained_leaf(module: torch.nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return not list(module.named_children()) and isinstance(weight, torch.Tensor) and weight.requires_grad


def fuse_head(model: torch.nn.Module) -> None:
    """Let `model` return log-probabilities and entropy in place of logits; before it is wrapped."""
    model.forward = partial(_fused_forward, model)


def unfuse_head(model: torch.nn.Module) -> None:
    """Let `model` return logits again."""
    del model.forward


def checkpointed(model: Any) -> None:
    """Let `model` drop activations and compute them again."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _fused_forward(model: Any, *, shift_labels: torch.Tensor, **inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """verl's forward with fused kernels (models/transformers/dense_common.py, forward_with_torch_backend)."""
    hidden = model.model(**inputs)[0]
    inputs_of = hidden.flatten(0, 1), model.lm_head.weight, shift_labels
    found: tuple[torch.Tensor, torch.Tensor] = FusedLogProbs.apply(*inputs_of)  # type: ignore[no-untyped-call]
    return found


def empty_cache() -> None:
    """Give cached memory back to the card, where vLLM's process takes it (aggressive_empty_cache)."""
    if (gpu := active_gpu()) is not None:
        gpu.memory.empty_cache()
