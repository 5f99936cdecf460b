"""The devices of this machine, and a recipe's demands on a card besides memory. Free of torch.

GPUs are found through NVML, host memory through the operating system.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from autofit.errors import ConfigError, option
from autofit.fakegpu.specs import GPU_SPECS, GpuSpec, UnknownGpuError, gpu_spec
from autofit.hardware.nvml import Gpu, driver_gpus, visible_gpus, why_none
from autofit.units import format_bytes

# The compute capability without which a setting is refused or emulated: bfloat16 and tf32 begin with 8.0
# (torch.cuda.is_bf16_supported without emulation; transformers refuses `tf32: true` below it), flash-attention 2 with
# 8.0 and 3 with 9.0 (Dao-AILab/flash-attention's README), fp8 matrix products with 8.9 (torch._scaled_mm),
# bitsandbytes' int8 products with 7.5 (its installation guide).
BFLOAT16_CAPABILITY = (8, 0)  # of cards that compute in bfloat16
_BFLOAT16 = ("bfloat16", "torch.bfloat16", "bf16")
_FLAGS = {
    "bf16": BFLOAT16_CAPABILITY, "bf16_full_eval": BFLOAT16_CAPABILITY, "tf32": (8, 0), "fp8": (8, 9),
    "load_in_8bit": (7, 5),
}  # fmt: skip
_MEANS = {"bf16": "bfloat16", "bf16_full_eval": "bfloat16", "load_in_8bit": "int8 products"}


@dataclass(frozen=True, slots=True)
class CardNeeds:
    """Each feature that a recipe names, the least compute capability that has it, and the setting that names it."""

    features: tuple[tuple[str, tuple[int, int], str], ...] = ()

    def met_by(self, spec: GpuSpec) -> bool:
        return not self.lacking(spec)

    def lacking(self, spec: GpuSpec) -> tuple[str, ...]:
        """The features that `spec` lacks, each with its setting in the recipe."""
        return tuple(f"{name} ({said})" for name, least, said in self.features if spec.compute_capability < least)

    def check_kernels(self, device: str) -> None:
        """Raise ConfigError if a simulated card lacks a kernel that the recipe names, as it has no substitute."""
        spec = _spec(device.removeprefix("sim:"))
        lacking = [said for said in self.lacking(spec) if said.startswith("flash attention 2")]
        if lacking:
            raise ConfigError(
                f"{spec.name} has no {lacking[0]}, and nothing computes it there: set another attention, such as sdpa, "
                f"or give another {option('gpu')}"
            )

    @property
    def words(self) -> str:
        """`bfloat16 and flash attention 2`; "" for a recipe that any card runs."""
        return " and ".join(dict.fromkeys(name for name, _, _ in self.features))


def has_bfloat16(device: str) -> bool:
    """True if a training on `device` may be in bfloat16: False on a card below 8.0; True if unknown."""
    if device.startswith("sim:"):
        return _spec(device.removeprefix("sim:")).compute_capability >= BFLOAT16_CAPABILITY
    found = gpus() if device == "cuda" else ()
    return all((gpu.compute_capability or BFLOAT16_CAPABILITY) >= BFLOAT16_CAPABILITY for gpu in found)


def card_needs(values: Mapping[str, object]) -> CardNeeds:
    """The needs of the recipe `values`, as its YAML states them; its defaults need no feature."""
    own = values.get("model_init_kwargs")
    return CardNeeds((*_named(values), *(_named(own) if isinstance(own, Mapping) else ())))


def _named(values: Mapping[str, object]) -> Iterator[tuple[str, tuple[int, int], str]]:
    for key, value in values.items():
        said = f"{key}: {str(value).lower() if isinstance(value, bool) else value}"
        if key in ("dtype", "torch_dtype") and str(value) in _BFLOAT16:
            yield "bfloat16", BFLOAT16_CAPABILITY, said
        elif key == "attn_implementation" and isinstance(value, str):
            yield from _attention(value, said)
        elif value is True and key in _FLAGS:
            yield _MEANS.get(key, key), _FLAGS[key], said


def _attention(name: str, said: str) -> Iterator[tuple[str, tuple[int, int], str]]:
    plain = name.replace("-", "_")
    if "flash_attention_3" in plain or "flash_attn3" in plain:
        yield "flash attention 3", (9, 0), said
    elif "flash_attention_2" in plain or "flash_attn" in plain:
        yield "flash attention 2", (8, 0), said


_SIMULATED_AT_ONCE = 64
Device = str  # "cpu", "cuda" or "sim:GPU", such as "sim:a100-40gb"

# Advertised sizes of cards in GB. If several cards have the same size, the size means the usual one: for 80 GB the
# A100, which is slower than the H100, so that predicted times are not too optimistic for the older card.
_SOLD_SIZES = (8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 80, 94, 96, 141, 144, 180, 192, 288)
_USUAL_CARDS = (
    "rtx4060ti", "rtx3080", "rtx2080ti", "rtx3060", "t4", "rtx4080", "rtx4090", "rtx5090", "a100-40gb", "a6000",
    "a100-80gb", "h100-nvl", "rtxpro6000", "h200", "b200",
)  # fmt: skip
_BY_NAME_ONLY = ("a800", "h20")  # sold in China alone: no size means them
_OTHER_BOX_SIZES = {"b200": (192,)}  # 192 GB of chips; systems are sold with 180 GB usable
NO_NEEDS = CardNeeds()
_GIVE = (
    f"give {option('target-vram', 'SIZE')} (40GB selects the A100-40GB) or {option('gpu', 'NAME')}, for example "
    f"{option('gpu', 'a100-40gb')}"
)


def slot_names(device: Device, count: int) -> tuple[str, ...]:
    """Names of the slots for probes on `device`: one per visible card, `count` on the CPU, 64 for simulated cards.

    A card is named by its UUID, which means the same to NVML, to CUDA and to searches that see other cards. A simulated
    probe occupies no device, so it need not wait for a measurement.
    """
    if device == "cuda":
        return tuple(f"cuda-{gpu.uuid}" for gpu in gpus())
    if device.startswith("sim:"):
        return tuple(f"sim-{i}" for i in range(_SIMULATED_AT_ONCE))
    return tuple(f"cpu-{i}" for i in range(count))


def gpus() -> tuple[Gpu, ...]:
    """The visible CUDA cards, MIG slices included."""
    return visible_gpus()


def training_device(asked: str) -> str:
    """The device `asked` for a training, cuda for auto. Raises ConfigError if it is unfit to train."""
    if asked == "sim":
        raise ConfigError("a pipeline trains, so its device must be cpu or cuda; got sim: use `autofit search`")
    if asked != "auto":
        return asked
    if not gpus():
        raise ConfigError(
            f"a pipeline trains on a CUDA card, and {why_none()}; give {option('device', 'cpu')} to train on the CPU, "
            f"or {option('plan')} {option('gpu', 'NAME')} for what would happen on a card elsewhere"
        )
    return "cuda"


def gpu_of_slot(slot_name: str) -> Gpu | None:
    """The card of a slot such as "cuda-GPU-..." (or "cuda-0"), visible to this process or hidden, as in jobs."""
    name = slot_name.removeprefix("cuda-")
    return next((gpu for gpu in driver_gpus() if name in (gpu.uuid, str(gpu.index))), None)


def slices_fault(cards: Iterable[Gpu], needed: int) -> str:
    """Reason why `needed` ranks fail to train on `cards`, if MIG slices are among them; "" if they can.

    A process sees one slice however many are named, and no two slices reach each other's memory (NVIDIA's MIG User
    Guide, "Device Enumeration" and "Application Considerations").
    """
    slices = sum(gpu.is_slice for gpu in cards)
    if needed < 2 or not slices:
        return ""
    return (
        f"{slices} of its cards {'is a MIG slice' if slices == 1 else 'are MIG slices'}, and several ranks need whole "
        f"cards: CUDA shows a process one slice only, and slices do not reach each other's memory"
    )


def threads_of_each(processes: int) -> int:
    """Threads for each of so many processes: an equal share of the cores that this one may use, at least one."""
    return max(1, len(os.sched_getaffinity(0)) // processes)


def host_memory_bytes() -> int:
    """Physical memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def choose_device(asked: str, gpu: str | None = None) -> Device:
    """`cpu`, `cuda`, or `sim:` plus the name of `gpu`. `auto` is `cuda` if there is a card, else `cpu`.

    Raises ConfigError for a missing or unknown card.
    """
    if gpu is not None:
        if asked not in ("auto", "sim"):
            raise ConfigError(
                f"{option('gpu')} names a simulated card, so {option('device')} must be auto or sim; got {asked}"
            )
        return f"sim:{_spec(gpu).name}"
    if asked == "sim":
        raise ConfigError(f"a simulated card needs a name or a size: {_GIVE}")
    if asked == "cpu":
        return "cpu"
    found = gpus()
    if asked == "cuda" and not found:
        raise ConfigError(
            f"{option('device', 'cuda')} needs a CUDA card, but {why_none()}; use {option('device', 'cpu')} or "
            f"{option('gpu', 'NAME')}"
        )
    return "cuda" if found else "cpu"


def choose_device_and_target(
    asked: str, gpu: str | None, asked_bytes: int | None, needs: CardNeeds = NO_NEEDS
) -> tuple[Device, int]:
    """(device for probes, target in bytes): `auto` is the CUDA card if there is one, else a simulated card.

    Without `gpu`, the simulated card is the one of size `asked_bytes` that meets `needs` (`card_of_size`). A target
    equal to the card's advertised size ("40GB", "24GiB") is lowered to the capacity that the card's driver reports.
    Raises ConfigError if neither argument selects a card.
    """
    simulated = gpu is not None or asked == "sim" or (asked == "auto" and not gpus())
    if not simulated or (gpu is not None and asked not in ("auto", "sim")):
        device = choose_device(asked, gpu)
        return device, choose_target(asked_bytes, device)
    if gpu is None and asked_bytes is None:
        none = f"no CUDA card is visible ({why_none()}), so one is simulated; " if asked == "auto" else ""
        raise ConfigError(f"{none}choose the simulated card: {_GIVE}")
    spec = _spec(gpu) if gpu is not None else card_of_size(cast(int, asked_bytes), needs)
    device = f"sim:{spec.name}"
    if asked_bytes is not None and _is_named_by(spec, asked_bytes):
        asked_bytes = min(asked_bytes, spec.capacity_bytes)
    return device, choose_target(asked_bytes, device)


def card_of_size(size_bytes: int, needs: CardNeeds = NO_NEEDS) -> GpuSpec:
    """The simulated card for `size_bytes`: the usual one of that advertised size, else the smallest that is larger.

    Only cards that meet `needs` count: a recipe in bfloat16 gets no T4. Advertised sizes are the GiB of a card's chips,
    and the driver reports a little less ("40 GB" A100: 39.4 GiB, which is 42.3e9 bytes; "16 GB" T4: 14.6 GiB, 15.6e9
    bytes), so both 40GB and 40GiB select the 40 GB card. Raises ConfigError if no card is large enough.
    """
    able = [spec for spec in GPU_SPECS.values() if spec.name not in _BY_NAME_ONLY and needs.met_by(spec)]
    named = [spec for spec in able if _is_named_by(spec, size_bytes)]
    usual = [spec for spec in named if spec.name in _USUAL_CARDS]
    if usual or named:
        return min(usual or named, key=lambda spec: spec.capacity_bytes)
    larger = [spec for spec in able if spec.capacity_bytes >= size_bytes and _box_sizes(spec)]
    if not larger:
        most = max(able, key=lambda spec: spec.capacity_bytes)
        raise ConfigError(
            f"{option('target-vram')} must be at most the capacity of the largest known card, {most.name} with "
            f"{format_bytes(most.capacity_bytes)}; got {format_bytes(size_bytes)}"
        )
    return min(larger, key=lambda spec: (_box_sizes(spec), spec.name not in _USUAL_CARDS, spec.capacity_bytes))


def about_choice(device: Device, gpu: str | None, asked_bytes: int | None, needs: CardNeeds) -> str:
    """Reason why this simulated card was taken, with the way to another, or a named one's missing features; else ""."""
    if not device.startswith("sim:"):
        return ""
    spec = _spec(device.removeprefix("sim:"))
    if gpu is not None:
        lacks = ", ".join(needs.lacking(spec))
        return f"{spec.name} was named, and has no {lacks} of its own" if lacks else ""
    size = _box_sizes(spec)[0]
    having = f" with {needs.words}" if needs.words else ""
    exact = asked_bytes is not None and _is_named_by(spec, asked_bytes)
    which = f"usual card of {size} GB{having}" if exact else f"smallest card{having} that has as much: {size} GB"
    others = [s.name for s in GPU_SPECS.values() if size in _box_sizes(s) and s != spec and needs.met_by(s)]
    shown = [*others[:3], "..."] if len(others) > 3 else others
    also = f" ({', '.join(shown)})" if shown else ""
    return f"simulated on {spec.name}, the {which}; --gpu NAME picks another{also}"


def _is_named_by(spec: GpuSpec, size_bytes: int) -> bool:
    return any(size_bytes in (box * 10**9, box * 2**30) for box in _box_sizes(spec))


def _box_sizes(spec: GpuSpec) -> tuple[int, ...]:
    """Advertised sizes of the card in GB: the first common size that is at least the capacity the driver reports."""
    sold = next((size for size in _SOLD_SIZES if size * 2**30 >= spec.capacity_bytes), None)
    return (() if sold is None else (sold,)) + _OTHER_BOX_SIZES.get(spec.name, ())


def _spec(name: str) -> GpuSpec:
    try:
        return gpu_spec(name)
    except UnknownGpuError as error:
        raise ConfigError(str(error)) from error


def simulated_twin(device: Device, card: str | None = None) -> Device | None:
    """The simulated card that predicts `device`: itself, or the card's model; None for an unknown model.

    `card` is the kind of the card where it is in another machine; None: the visible one.
    """
    if device.startswith("sim:"):
        return device
    spec, _ = _twin(device, card)
    return None if spec is None else f"sim:{spec.name}"


def about_twin(device: Device, card: str | None = None) -> str:
    """Difference of the card from the one that predicts it, or why none does; "" if there is none to tell."""
    return _twin(device, card)[1] if device == "cuda" else ""


def _twin(device: Device, card: str | None) -> tuple[GpuSpec | None, str]:
    if device == "cuda" and card is not None:
        return card_of(board_of(card))
    names = sorted({gpu.name for gpu in gpus()}) if device == "cuda" else []
    if len(names) > 1:
        return None, f"the visible cards are of several kinds: {', '.join(names)}"
    return card_of(names[0]) if names else (None, "")


def choose_target(asked_bytes: int | None, device: Device, cards: tuple[Gpu, ...] | None = None) -> int:
    """The target in bytes: `asked_bytes`, or all of the card or machine. Raises ConfigError if it exceeds the capacity.

    `cards` are those of another machine; None: the visible ones.
    """
    if device.startswith("sim:"):
        capacity = _spec(device.removeprefix("sim:")).capacity_bytes
    else:
        capacity = min(g.capacity_bytes for g in cards or gpus()) if device == "cuda" else host_memory_bytes()
    what = "machine" if device == "cpu" else "card"
    if asked_bytes is None:
        return capacity
    if asked_bytes > capacity:
        raise ConfigError(
            f"{option('target-vram')} must be at most the {what}'s memory of {format_bytes(capacity)}; got "
            f"{format_bytes(asked_bytes)}"
        )
    return asked_bytes


# -- the names of cards -----------------------------------------------------------------------------------------------
# Of the driver, of the table, and of kinds, by which studies differ. A driver has one name for each board. Only boards
# that hold the same bytes are taken for one another; another chip, or another amount of memory, would make every
# predicted figure a guess. Names are NVML's, from NVIDIA's list of supported products in the driver's README, and from
# public logs for Tesla V100-SXM2-16GB-N (NVIDIA/warp's documentation).
#
# A study belongs to one kind, since bytes and seconds of another are another's. A kind is the driver's name with the
# capacity, "NVIDIA A100-SXM4-80GB, 79 GiB": some names are sold with several sizes. Or it is a name of the table,
# "a100-80gb", which means the boards that differ from it in nothing.

# {a driver's name: (card of the table, how the board differs)}; NVIDIA's data sheets.
_SAME_CHIP = {
    "NVIDIA A800 80GB PCIe": ("a100-pcie-80gb", "a slower NVLink bridge"),
    "NVIDIA H800": ("h100", "a slower NVLink"),
    "NVIDIA H800 PCIe": ("h100-pcie", "a slower NVLink"),
    "NVIDIA H200 NVL": ("h200", "600 W in place of 700, arithmetic 16 % slower"),
    "Tesla V100-SXM2-16GB-N": ("v100-16gb", "a variant of the board; how it differs is not published"),
    "Tesla V100-SXM3-32GB": ("v100-32gb", "350 W in place of 300"),
    "Tesla V100-DGXS-32GB": ("v100-32gb", "in a workstation"),
    "Tesla V100-DGXS-16GB": ("v100-16gb", "in a workstation"),
    "Tesla V100-PCIE-16GB": ("v100-16gb", "250 W in place of 300, arithmetic 11 % slower"),
    "Tesla V100-PCIE-32GB": ("v100-32gb", "250 W in place of 300, arithmetic 11 % slower"),
}


def card_of(driver_name: str) -> tuple[GpuSpec | None, str]:
    """(the card that predicts one of that name, its difference); (None, the reason) if none does."""
    if driver_name in _SAME_CHIP:
        name, difference = _SAME_CHIP[driver_name]
        return gpu_spec(name), f"{driver_name} is predicted as {name}: {difference}"
    if " MIG " in driver_name:
        return None, f"{driver_name} is a slice of a card, and slices are not simulated"
    if driver_name.removeprefix("NVIDIA ").startswith("GRID ") or _is_virtual(driver_name):
        return None, f"{driver_name} is a virtual card with a share of a card's memory, and these are not simulated"
    try:
        return gpu_spec(driver_name), ""
    except UnknownGpuError as error:
        return None, str(error)


def _is_virtual(name: str) -> bool:
    """True if a name ends as NVIDIA's vGPU profiles do: GB and a letter for the licence ("NVIDIA A40-48Q")."""
    profile = name.rpartition("-")[2]
    return profile[:-1].isdigit() and profile[-1:] in "ABCQ" and "-" in name


_GIB = 1 << 30


def kind_of(gpu: Gpu) -> str:
    """The kind of a card, from what its driver tells."""
    return f"{gpu.name}, {gpu.capacity_bytes / _GIB:.0f} GiB"


def board_of(kind: str) -> str:
    """The driver's name of the cards of `kind`, or its name in the table: what `driver_names.card_of` reads."""
    return kind if kind in GPU_SPECS else kind.rpartition(", ")[0]


def is_of_kind(gpu: Gpu, kind: str) -> bool:
    """True if the card is of `kind`. Capacities of one board differ a little from driver to driver."""
    if kind in GPU_SPECS:
        spec, difference = card_of(gpu.name)
        asked = GPU_SPECS[kind]  # of a name that is sold with several sizes, the one of its size: "RTX 4060 Ti 16GB"
        sized = asked.full_name.startswith(f"{gpu.name} ") and abs(gpu.capacity_bytes - asked.capacity_bytes) < _GIB
        return spec is not None and not difference and (spec.name == kind or sized)
    name, _, size = kind.rpartition(", ")
    return gpu.name == name and abs(gpu.capacity_bytes / _GIB - float(size.removesuffix(" GiB"))) < 0.8
