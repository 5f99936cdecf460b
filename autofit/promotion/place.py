"""Where a promoted run trains: on the device of its study, or where the user says."""

from collections.abc import Mapping

from autofit.errors import ConfigError
from autofit.fakegpu.specs import gpu_spec
from autofit.hardware.driver_names import card_of
from autofit.hardware.hardware import Device, choose_device, gpus
from autofit.recipe.launch import Launch


def training_device(studied: Device, asked: str, *, begun: Mapping[str, object] | None = None) -> Device:
    """`cpu` or `cuda`: what was asked, what the run has `begun` on, or the device of the study, `studied`.

    Raises ConfigError where the study is of a card that this machine lacks and nobody said where to train.
    """
    if asked != "auto":
        return _given(asked)
    if begun is not None:
        return str(begun["device"])
    if studied.startswith("sim:"):
        return _of_simulated(studied.removeprefix("sim:"))
    if studied == "cuda" and not gpus():
        raise ConfigError(f"the study measured a CUDA card, and the driver lists none here; {_SAY_WHERE}")
    return studied


_SAY_WHERE = "say where the run trains with --device cpu or --device cuda, or write its YAML only with --write-only"


def check_ranks(launch: Launch, device: Device) -> None:
    """Raise ConfigError for a launch whose ranks this machine cannot start on `device`."""
    write = "write its files with --write-only, and start it with the command that they name"
    if launch.machines > 1:
        raise ConfigError(f"the run trains on {launch.machines} machines, and autofit starts it on one; {write}")
    if device == "cpu" and launch.sharding not in ("ddp", "fsdp2"):
        raise ConfigError(f"ranks on the CPU train with ddp or fsdp2, and the run has {launch.sharding}; {write}")
    if device == "cuda" and launch.cards > len(gpus()):
        raise ConfigError(f"the run trains on {launch.cards} cards, and this machine has {len(gpus())}; {write}")


def _given(asked: str) -> Device:
    if asked == "cuda" and not gpus():
        raise ConfigError(
            "--device cuda needs a CUDA card, but the driver lists none; give --device cpu, or run it on a machine "
            "with a card"
        )
    return choose_device(asked)


def _of_simulated(name: str) -> Device:
    if any(card is not None and card.name == name for card, _ in (card_of(gpu.name) for gpu in gpus())):
        return "cuda"
    found = ", ".join(sorted({gpu.name for gpu in gpus()}))
    here = f"this machine has another card ({found})" if found else "this machine has no CUDA card"
    raise ConfigError(f"the study simulated an {gpu_spec(name).full_name}, and {here}; {_SAY_WHERE}")
