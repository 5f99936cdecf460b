"""DeepSpeed's files that LLaMA-Factory and Axolotl ship, for a user's file that names one of them from elsewhere.

Their settings, read at LLaMA-Factory 1d6e8b21 (examples/deepspeed) and Axolotl 2341b2c0, 1377ccc3 and 58b1d3a4
(deepspeed_configs). No torch here.
"""

from collections.abc import Mapping
from pathlib import Path

from autofit.errors import ConfigError
from autofit.frontends.draft import Draft
from autofit.frontends.sharing import fsdp, near, zero
from autofit.frontends.tools import AXOLOTL, LLAMA_FACTORY

_ON_HOST = {"device": "cpu", "pin_memory": True}
_BOTH = {"offload_optimizer": _ON_HOST, "offload_param": _ON_HOST}
_SIZES = {"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
          "stage3_param_persistence_threshold": "auto", "contiguous_gradients": True}  # fmt: skip
_LF2 = {"stage": 2, "overlap_comm": False, "reduce_scatter": True, "contiguous_gradients": True,
        "allgather_bucket_size": 500_000_000, "reduce_bucket_size": 500_000_000,
        "round_robin_gradients": True}  # fmt: skip
_LF3 = {"stage": 3, "overlap_comm": False, **_SIZES, "sub_group_size": 1_000_000_000,
        "stage3_max_live_parameters": 1_000_000_000, "stage3_max_reuse_distance": 1_000_000_000}  # fmt: skip
_AX3 = {"stage": 3, "overlap_comm": True, **_SIZES, "sub_group_size": 0, "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0}  # fmt: skip
_AX1 = {"stage": 1, "overlap_comm": True}
_AX2 = {"stage": 2, "offload_optimizer": {"device": "cpu"}, "contiguous_gradients": True, "overlap_comm": True}
_COUNTS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
_FILES: Mapping[str, Mapping[str, Mapping[str, object]]] = {
    LLAMA_FACTORY.name: {
        "ds_z0_config.json": {**_LF2, "stage": 0}, "ds_z2_config.json": _LF2,
        "ds_z2_offload_config.json": {**_LF2, "offload_optimizer": _ON_HOST}, "ds_z3_config.json": _LF3,
        "ds_z3_offload_config.json": {**_LF3, **_BOTH},
    },
    AXOLOTL.name: {
        "zero1.json": _AX1, "zero2.json": _AX2, "zero3.json": _AX3, "zero3_bf16.json": _AX3,
        "zero3_bf16_cpuoffload_all.json": {**_AX3, **_BOTH},
        "zero3_bf16_cpuoffload_params.json": {**_AX3, "offload_param": _ON_HOST},
    },
}  # fmt: skip


def shipped(tool: str, given: object) -> dict[str, object] | None:
    """The settings of the file that `tool` ships under this path's name; None where it ships none."""
    zero = _FILES.get(tool, {}).get(Path(given).name) if isinstance(given, str) else None
    return (
        None
        if zero is None
        else {**dict.fromkeys(_COUNTS, "auto"), "bf16": {"enabled": "auto"}, "zero_optimization": dict(zero)}
    )


def deepspeed(draft: Draft, folder: Path) -> object:
    """The `deepspeed` of a tool's file in `folder`, or the settings of the shipped file where that is not here."""
    given = draft.given["deepspeed"]
    found = shipped(draft.tool, given)
    if found is not None:
        try:
            near(str(given), folder)
        except ConfigError:
            draft.note(f"{given} is not here: the file of that name that {draft.tool} ships is taken for it")
            return found
    return given


def launch_of(draft: Draft, folder: Path) -> dict[str, object]:
    """The accelerate config of transformers' `deepspeed`, or of its `fsdp` and `fsdp_config`; {} without both."""
    given = draft.raw("fsdp_config")
    config = {str(key): value for key, value in given.items()} if isinstance(given, Mapping) else {}
    wrapped = draft.raw("fsdp_transformer_layer_cls_to_wrap")
    if wrapped is not None:  # transformers puts it into fsdp_config
        config.setdefault("transformer_layer_cls_to_wrap", wrapped)
    if draft.says("deepspeed"):
        return zero(deepspeed(draft, folder), folder)
    if draft.says("fsdp"):
        return fsdp(draft.given["fsdp"], config)
    draft.ignore(("fsdp_min_num_params",))
    return {}
