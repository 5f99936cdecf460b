"""The estimators: how each is installed, told a row as its page says, and read; its figure, and what it cannot say."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from experiments.accuracy import places
from experiments.accuracy.rows import SETS
from experiments.peers.rows import Row

PROGRAMS = Path(__file__).parent / "programs"
GIB = 2**30
MIB = 2**20


class CannotSayError(Exception):
    """A row that an estimator has no words for, with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """Peak bytes of one card, and seconds of a step where the estimator says them."""

    bytes: int
    step_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """An estimator. `command` is what its page says to run, with the row's folder as the working directory."""

    name: str
    requirement: tuple[str, ...]  # for pip, in an environment of its own; none: the environment of autofit
    sees_torch: bool = False  # its environment sees autofit's, whose torch it needs
    distribution: str  # whose version is written down
    means: str
    lacks: str  # of: seconds a step, LoRA, 4 bits, several cards, GRPO
    command: Callable[[Row, str], list[str]]  # (row, folder of the environment's programs)
    read: Callable[[str, Row], Said]


def _json(out: str) -> dict[str, Any]:
    """The JSON object in what was printed."""
    return dict(json.loads(out[out.index("{") : out.rindex("}") + 1]))


def _needs(row: Row, *, lora: bool = True, full: bool = True, four_bits: bool = True, ranks: bool = True,
           encoders: bool = True) -> None:  # fmt: skip
    """Raises CannotSayError for a row that is beyond what an estimator has words for."""
    if row.is_lora and not lora:
        raise CannotSayError("LoRA")
    if not row.is_lora and not full:
        raise CannotSayError("training of all weights")
    if row.method == "qlora" and not four_bits:
        raise CannotSayError("weights in 4 bits")
    if row.ranks > 1 and not ranks:
        raise CannotSayError("several cards")
    if row.task == "encoder" and not encoders:
        raise CannotSayError("encoders")


def _python(row: Row) -> str:
    """The interpreter whose libraries are those that the row was measured with, where they are known to matter."""
    return str(places.python(SETS[row.libraries])) if row.libraries else sys.executable


# accelerate


def _accelerate(row: Row, programs: str) -> list[str]:
    _needs(row, lora=False, ranks=False)
    dtype = "float16" if row.precision == "bf16" else "float32"  # it has no bfloat16, which is as large
    return [
        sys.executable,
        "-m",
        "accelerate.commands.accelerate_cli",
        "estimate-memory",
        row.model,
        "--library_name",
        "transformers",
        "--dtypes",
        dtype,
    ]


def _accelerate_read(out: str, row: Row) -> Said:
    units = {"KB": 2**10, "MB": MIB, "GB": GIB}
    figures = re.findall(
        r"([\d.]+) (KB|MB|GB)", next(line for line in out.splitlines() if "float" in line and "B" in line)
    )
    number, unit = figures[-1]  # the last column: training using Adam
    return Said(bytes=round(float(number) * units[unit]))


# DeepSpeed


def _deepspeed(row: Row, programs: str) -> list[str]:
    _needs(row, lora=False)
    return [f"{programs}/python", str(PROGRAMS / "zero_states.py"), "."]


# torch's own tools


def _torch(row: Row, programs: str) -> list[str]:
    _needs(row, four_bits=False)
    return [_python(row), str(PROGRAMS / "mem_tracker.py"), "."]


# AgileRL


def _agilerl(row: Row, programs: str) -> list[str]:
    _needs(row, full=False, four_bits=False, encoders=False)
    if row.ranks > 1:
        raise CannotSayError(
            "several cards of a data-set algorithm (the page sizes a manifest's trainer ranks only with async rollouts)"
        )
    targets = list(row.lora_targets)
    manifest = {
        "algorithm": {"name": "SFT", "batch_size": row.micro_batch, "micro_batch_size_per_gpu": row.micro_batch,
                      "gradient_checkpointing": row.checkpointing, "use_liger_loss": False},
        "network": {"pretrained_model_name_or_path": row.model, "max_context_length": row.tokens,
                    "lora_config": {"lora_r": row.lora_r, "target_modules": targets}},
        "environment": {"env_type": "dataset", "objective": "sft", "hf_dataset_id": "tatsu-lab/alpaca"},
        "training": {"max_steps": 10},
    }  # fmt: skip
    Path("manifest.yaml").write_text(yaml.safe_dump(manifest), encoding="utf-8")
    return [f"{programs}/arena", "memory", "estimate", "manifest.yaml", "--device-gb", str(row.card_gib), "--json"]


def _agilerl_read(out: str, row: Row) -> Said:
    parts = {one["key"]: one["bytes"] for one in _json(out)["training"]["components"]}
    overhead = parts.pop("overhead")  # context, libraries
    slack = parts.pop("allocator_reserve")
    del overhead
    return Said(bytes=sum(parts.values()) + (slack if row.kind == "reserved" else 0))


# torch-preflight


def _preflight(row: Row, programs: str) -> list[str]:
    _needs(row, lora=False)
    dtype = {"bf16": "pure-bf16", "amp-bf16": "amp", "amp-fp16": "amp"}[row.precision]
    words = [f"{programs}/torch-preflight", "estimate", "--model", row.model, "--online", "--batch-size",
             str(row.micro_batch), "--seq-len", str(row.tokens), "--dtype", dtype, "--optimizer", "adamw", "-f", "json",
             "--gpu-memory", f"{row.card_gib}GiB"]  # fmt: skip
    words += ["--checkpointing"] if row.checkpointing else []
    words += ["--flash"] if row.attention != "eager" else []
    return words + (["--world-size", str(row.ranks), "--sharding", "zero-3"] if row.sharding == "fsdp" else [])


def _preflight_read(out: str, row: Row) -> Said:
    found = _json(out)
    if not found["resolved"]:
        raise CannotSayError(f"the model: {found['model']['reason']}")
    parts = dict(found["breakdown"])
    parts.pop("CUDA_context")
    slack = parts.pop("fragmentation")
    return Said(bytes=sum(parts.values()) + (slack if row.kind == "reserved" else 0))


# fitcheck-llm


def _fitcheck(row: Row, programs: str) -> list[str]:
    _needs(row, ranks=False, encoders=False)
    precision = {"bf16": "bf16", "amp-bf16": "fp32", "amp-fp16": "fp32"}[row.precision]
    states = "fp32" if row.precision != "bf16" or (row.is_lora and row.adapter == "float32") else "bf16"
    words = [f"{programs}/fitcheck", row.model, "--precision", precision, "--batch-size", str(row.micro_batch),
             "--seq-len", str(row.tokens), "--optimizer", "adamw", "--json",
             "--vram-mib", str(round(row.card_gib * 1024)),
             "--optimizer-dtype", states]  # fmt: skip
    words += (
        ["--lora-r", str(row.lora_r), "--lora-targets", ",".join(row.lora_targets)] if row.is_lora else ["--no-lora"]
    )
    words += ["--grad-checkpoint"] if row.checkpointing else []
    return words + (["--flash-attn"] if row.attention != "eager" else [])


def _fitcheck_read(out: str, row: Row) -> Said:
    parts = dict(_json(out)["memory_mib"])
    total, overhead = parts["total"], parts["overhead"]
    return Said(bytes=round((total if row.kind == "reserved" else total - overhead) * MIB))


# ftuneai


def _ftune(row: Row, programs: str) -> list[str]:
    _needs(row, encoders=False)
    return [f"{programs}/python", str(PROGRAMS / "ftune_row.py"), "."]


def _ftune_read(out: str, row: Row) -> Said:
    found = _json(out)
    total, overhead = found["total_gb"], found["overhead_gb"]
    gb = total if row.kind == "reserved" else total - overhead
    return Said(bytes=round(gb * GIB), step_s=found["step_s"])


# canifinetune


def _canifinetune(row: Row, programs: str) -> list[str]:
    _needs(row, ranks=False, encoders=False)
    scope = "attention" if row.attention_only else "all_linear"
    words = [f"{programs}/canifinetune", "estimate", "--model", row.model, "--method", row.method, "--gpu-vram-gb",
             str(row.card_gib), "--seq-len", str(row.tokens), "--micro-batch-size", str(row.micro_batch),
             "--base-dtype",
             "bf16" if row.precision == "bf16" else "fp32", "--optimizer", "adamw_torch", "--attn",
             row.attention, "--json"]  # fmt: skip
    words += ["--gradient-checkpointing" if row.checkpointing else "--no-gradient-checkpointing"]
    return words + (["--lora-rank", str(row.lora_r), "--target-scope", scope] if row.is_lora else [])


def _canifinetune_read(out: str, row: Row) -> Said:
    parts = _json(out)["memory"]
    reserved = parts["total_estimated_gb"] - parts["safety_margin_gb"]  # its target is torch's peak reserved
    allocated = reserved - parts["cuda_overhead_gb"]
    return Said(bytes=round((reserved if row.kind == "reserved" else allocated) * GIB))


# vramcalc


def _vramcalc(row: Row, programs: str) -> list[str]:
    _needs(row, four_bits=False, ranks=False, encoders=False)
    attention = {"flash_attention_2": "flash"}.get(row.attention, row.attention)
    words = [f"{programs}/vramcalc", row.model, "--train", "--dtype", "fp16" if row.precision == "amp-fp16" else "bf16",
             "--precision", "pure" if row.precision == "bf16" else "amp", "--batch", str(row.micro_batch), "--seq",
             str(row.tokens), "--attn", attention, "--json"]  # fmt: skip
    words += ["--lora", str(row.lora_r)] if row.is_lora else []
    return words + (["--grad-checkpoint"] if row.checkpointing else [])


def _vramcalc_read(out: str, row: Row) -> Said:
    found = _json(out)
    return Said(bytes=int(found.get("estimate", found)["total"]))


# alloc and vram-check: by the number of parameters


def _alloc(row: Row, programs: str) -> list[str]:
    _needs(row, lora=False, ranks=False)
    config = json.loads(Path("model/config.json").read_text(encoding="utf-8"))
    hidden = config.get("hidden_size") or config.get("n_embd") or config.get("dim")
    return [f"{programs}/alloc", "ghost", "train.py", "--param-count-b", str(row.parameters / 1e9), "--dtype",
            "bf16" if row.precision == "bf16" else "fp32", "--batch-size", str(row.micro_batch), "--seq-length",
            str(row.tokens), "--hidden-dim", str(hidden), "--no-config", "--json"]  # fmt: skip


def _alloc_read(out: str, row: Row) -> Said:
    found = _json(out)
    return Said(bytes=round((found["total_gb"] - (0 if row.kind == "reserved" else found["buffer_gb"])) * GIB))


def _vram_check(row: Row, programs: str) -> list[str]:
    _needs(row, lora=False, ranks=False)
    return [f"{programs}/vram-check", "quick", "--params", str(row.parameters), "--batch-size", str(row.micro_batch),
            "--dtype", "bf16" if row.precision == "bf16" else "fp32", "--optimizer", "adamw"]  # fmt: skip


def _vram_check_read(out: str, row: Row) -> Said:
    found = re.search(r"Total:\s+([\d.]+) GB", out)
    assert found is not None, out
    return Said(bytes=round(float(found.group(1)) * GIB))


# autofit


def _recipe(row: Row) -> Mapping[str, object]:
    recipe: dict[str, object] = {
        "model_name_or_path": "model", "dtype": "bfloat16" if row.precision == "bf16" else "float32",
        "bf16": row.precision == "amp-bf16", "fp16": row.precision == "amp-fp16", "attn_implementation": row.attention,
        "per_device_train_batch_size": row.micro_batch, "gradient_accumulation_steps": row.accumulation,
        "optim": "adamw_torch", "gradient_checkpointing": row.checkpointing, "max_length": row.tokens,
        "use_peft": row.is_lora,
    }  # fmt: skip
    if row.is_lora:
        recipe |= {
            "lora_r": row.lora_r,
            "lora_alpha": 2 * row.lora_r,
            "lora_target_modules": list(row.lora_targets),
            "lora_dropout": row.lora_dropout,
        }
    if row.method == "qlora":
        recipe |= {"load_in_4bit": True, "use_bnb_nested_quant": True}
    return recipe


# As the benchmark's own accelerate file: FSDP1, each decoder layer a unit.
_FSDP = {
    "distributed_type": "FSDP", "num_processes": 2, "mixed_precision": "no",
    "fsdp_config": {
        "fsdp_version": 1, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_forward_prefetch": False, "fsdp_offload_params": False, "fsdp_sharding_strategy": 1,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_sync_module_states": True, "fsdp_use_orig_params": True,
    },
}  # fmt: skip


def _estimate(row: Row, programs: str) -> list[str]:
    _needs(row, encoders=False)
    if row.keeps_gradients:
        raise CannotSayError("a loop that keeps its gradients between steps: no trainer does; see fit-check")
    Path("recipe.yaml").write_text(yaml.safe_dump(dict(_recipe(row))), encoding="utf-8")
    words = [sys.executable, "-m", "autofit", "estimate", "recipe.yaml", "--trainer", "hf", "--prompt-tokens",
             str(row.tokens), "--no-advice", "--json"]  # fmt: skip
    if row.ranks == 1:
        return [*words, "--gpu", row.card]
    Path("fsdp.yaml").write_text(yaml.safe_dump(_FSDP), encoding="utf-8")
    return [*words, "--gpu", f"{row.ranks}x{row.card}", "--accelerate_config", "fsdp.yaml"]


def _fit_check(row: Row, programs: str) -> list[str]:
    _needs(row, ranks=False, four_bits=False)
    return [_python(row), "-m", "autofit", "fit-check", "--gpu", row.card, "--steps", "3", "--json",
            str(PROGRAMS / "loop.py"), "."]  # fmt: skip


def _autofit_read(out: str, row: Row) -> Said:
    found = _json(out.strip().splitlines()[-1])
    return Said(bytes=found[f"peak_{row.kind}_bytes"], step_s=found["step_s"])


PEERS = (
    Peer(name="autofit estimate", requirement=(), distribution="autofit-llm", command=_estimate, read=_autofit_read,
         means="torch's peak allocated or reserved bytes of transformers' Trainer, as the row was measured", lacks="-"),
    Peer(name="autofit fit-check", requirement=(), distribution="autofit-llm", command=_fit_check, read=_autofit_read,
         means="the same of a plain loop (programs/loop.py)", lacks="several cards"),
    Peer(name="torch MemTracker", requirement=(), distribution="torch", command=_torch,
         read=lambda out, row: Said(bytes=max(_json(out.strip().splitlines()[-1])["peaks"].values())),
         means="peak of all tensors of the same loop under FakeTensorMode; no allocator; on several cards FSDP2",
         lacks="seconds without a card, 4 bits, GRPO; a program must be written"),
    Peer(name="AgileRL", requirement=("agilerl-arena[hub]",), distribution="agilerl-arena", command=_agilerl,
         read=_agilerl_read, lacks="seconds, training of all weights, 4 bits",
         means="its own trainer (it errs high), without context; slack only where reserved was measured"),
    Peer(name="vramcalc", requirement=("vramcalc[hf]",), distribution="vramcalc", command=_vramcalc,
         read=_vramcalc_read,
         means="torch's peak allocated", lacks="seconds, 4 bits, several cards, GRPO, LoRA but on q, k, v, o"),
    Peer(name="fitcheck-llm", requirement=("fitcheck-llm",), distribution="fitcheck-llm", command=_fitcheck,
         read=_fitcheck_read, lacks="seconds, several cards, GRPO",
         means="tensors; with its overhead (context too) where reserved was measured"),
    Peer(name="canifinetune", requirement=("canifinetune",), distribution="canifinetune", command=_canifinetune,
         read=_canifinetune_read, lacks="seconds, several cards, GRPO",
         means="torch's peak reserved, without its safety margin; without its overhead where allocated was measured"),
    Peer(name="ftuneai", requirement=("ftuneai[cli]", "typer", "rich"), distribution="ftuneai", command=_ftune,
         read=_ftune_read, lacks="GRPO", means="its total; without its overhead where allocated was measured"),
    Peer(name="torch-preflight", requirement=("torch-preflight[hub]",), distribution="torch-preflight",
         command=_preflight, read=_preflight_read, lacks="seconds, LoRA, 4 bits, GRPO",
         means="its total without the context; fragmentation only where reserved was measured"),
    Peer(name="alloc ghost", requirement=("alloc",), distribution="alloc", command=_alloc, read=_alloc_read,
         lacks="seconds, LoRA, 4 bits, several cards, GRPO",
         means="by the number of parameters; its buffer only where reserved was measured"),
    Peer(name="vram-check", requirement=("vram-check",), distribution="vram-check", command=_vram_check,
         read=_vram_check_read, lacks="seconds, LoRA, 4 bits, lengths, several cards, GRPO",
         means="by the number of parameters and the batch"),
    Peer(name="accelerate", requirement=(), distribution="accelerate", command=_accelerate,
         read=_accelerate_read, lacks="seconds, LoRA, lengths, several cards, GRPO",
         means="weights, gradients and Adam; its page says that activations are left out"),
    Peer(name="DeepSpeed", requirement=("deepspeed",), sees_torch=True, distribution="deepspeed", command=_deepspeed,
         read=lambda out, row: Said(bytes=int(_json(out)["bytes"])), lacks="seconds, LoRA, activations, GRPO",
         means="model states with ZeRO-3, in its mixed precision; its page says that activations are left out"),
)  # fmt: skip
