"""Host memory of the ranks of a training on their machine: while they load, train and save. Free of torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from autofit.recipe.launch import Launch, is_on, state_dict_type
from autofit.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Bytes of host memory, excluding those of Python and its libraries, about the same for every rank.

    `load_bytes` is what each of the `loading_ranks` of the machine's `ranks` holds while it loads its models, and
    `share_bytes` what each of the others takes of them meanwhile. While it trains each rank holds `kept_bytes` at its
    peak (None is "not known"), `pinned_bytes` of them pinned. Rank 0 holds `save_bytes` more while it saves the state
    spread over the ranks: the model, then the optimizer's state.
    """

    ranks: int
    load_bytes: int
    loading_ranks: int
    share_bytes: int = 0
    kept_bytes: int | None = None
    pinned_bytes: int = 0
    save_bytes: int = 0

    @property
    def rank_bytes(self) -> int:
        """The most that one rank holds: rank 0."""
        return max(self.load_bytes, (self.kept_bytes or 0) + self.save_bytes)

    @property
    def machine_bytes(self) -> int:
        """The most that all ranks of a machine hold at once."""
        return max(self._loading_bytes, (self.kept_bytes or 0) * self.ranks + self.save_bytes)

    @property
    def _loading_bytes(self) -> int:
        return self.load_bytes * self.loading_ranks + self.share_bytes * (self.ranks - self.loading_ranks)

    @property
    def told(self) -> str:
        """One sentence for people."""
        unknown = "" if self.kept_bytes is not None else "; what is offloaded comes on top, and is not counted"
        if self.machine_bytes > self._loading_bytes and self.save_bytes:
            why = f"rank 0 gathers {format_bytes(self.save_bytes)} to save"
        else:
            why = f"{self.loading_ranks} of its {self.ranks} ranks load {format_bytes(self.load_bytes)}"
            if self.share_bytes and self.ranks > self.loading_ranks:
                why += f", the others {format_bytes(self.share_bytes)}"
        most = "at most" if self.kept_bytes is not None else "more than"
        return (
            f"host memory: {most} {format_bytes(self.rank_bytes)} per rank and {format_bytes(self.machine_bytes)} on "
            f"the machine, as {why}{unknown}"
        )


def host_memory(
    launch: Launch, weights_bytes: int, *, kept_bytes: int | None = None, pinned_bytes: int = 0,
    load_bytes: int = 0, share_bytes: int = 0, whole_bytes: int | None = None,
) -> HostMemory:  # fmt: skip
    """The host memory of a launch that trains a model of `weights_bytes`, as loaded; `load_bytes` are seen to load it.

    `share_bytes` are those that a rank keeps on the host once it has loaded: it has them twice for a while, as they are
    pinned by a copy.

    transformers loads on the CPU in every rank of a distributed training (TRL sets device_map to None), but under FSDP
    with `fsdp_cpu_ram_efficient_loading` in the first rank of each machine only, and under ZeRO-3 with
    `zero3_init_flag` in rank 0 only (transformers 5.23, modeling_utils.py). A safetensors file is mapped besides: its
    pages are the kernel's to take back, and not counted. FSDP's full state dicts (of the model, then of the optimizer:
    accelerate 1.15, save_fsdp_model and save_fsdp_optimizer) and ZeRO-3's 16-bit model are gathered in the host memory
    of rank 0 when they are saved; `whole_bytes` are the larger of FSDP's two, where it is known.
    """
    ranks, load_bytes = launch.ranks // launch.machines, max(load_bytes, weights_bytes)
    fsdp = launch.sharding.startswith("fsdp")
    save_bytes = whole_bytes if fsdp and whole_bytes is not None else weights_bytes
    return HostMemory(
        ranks=ranks, load_bytes=load_bytes, loading_ranks=1 if loads_once(launch) else ranks,
        share_bytes=min(2 * share_bytes, load_bytes - weights_bytes) if loads_once(launch) else 0,
        kept_bytes=kept_bytes, pinned_bytes=pinned_bytes,
        save_bytes=save_bytes if (fsdp or launch.sharding == "zero3") and _saves_whole(launch) else 0,
    )  # fmt: skip


def shortage(launch: Launch, weights_bytes: int, machine_bytes: int) -> tuple[str, ...]:
    """A note where the ranks need more than the memory of their machine to load a model of `weights_bytes`."""
    needed = host_memory(launch, weights_bytes, kept_bytes=0 if launch.offload == "none" else None)
    if launch.is_plain or needed.machine_bytes <= machine_bytes:
        return ()
    return (
        f"{needed.told}; this machine has {format_bytes(machine_bytes)}, so the kernel may end a rank: shard with "
        "fsdp2 and fsdp_cpu_ram_efficient_loading, or with zero3 and zero3_init_flag",
    )


def loads_once(launch: Launch) -> bool:
    """True if one rank of a machine loads the model for all of them."""
    if launch.sharding.startswith("fsdp"):
        return _flag(launch, "fsdp_config", "fsdp_cpu_ram_efficient_loading", default=True)
    return launch.sharding == "zero3" and _flag(launch, "deepspeed_config", "zero3_init_flag", default=True)


def _saves_whole(launch: Launch) -> bool:
    if launch.sharding == "zero3":
        return _flag(launch, "deepspeed_config", "zero3_save_16bit_model", default=True)
    return state_dict_type(launch.config.get("fsdp_config"), launch.sharding) == "FULL_STATE_DICT"


def _flag(launch: Launch, section: str, key: str, *, default: bool) -> bool:
    given = launch.config.get(section)
    value = given.get(key, default) if isinstance(given, Mapping) else default
    return is_on(value)
