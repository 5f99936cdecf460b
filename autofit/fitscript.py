"""`autofit fit-check SCRIPT`: a training script of one's own, run unchanged on a simulated card for a few steps.

The script's own process ends after its last step by an exception that only `except BaseException` would hold up.
Importing this loads no torch.
"""

import os
import runpy
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from autofit.errors import ConfigError, quoted
from autofit.fitcheck import CheckedLoop, FitCheck, checked_card

if TYPE_CHECKING:
    import torch

    from autofit.fakegpu import FakeGpu

_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "disabled"}
_LIBRARIES = ("transformers", "trl", "peft")  # whose models may have to stand in for weights that are not here
_LOCAL = ("127.", "localhost", "::1")


class _Enough(BaseException):
    """The steps that were asked for are done."""


def fit_script(
    script: Path, arguments: Sequence[str] = (), *, gpu: str, steps: int = 2, target_vram: str | int | None = None
) -> FitCheck:
    """Peak memory by step, and step time, of a script on the simulated card `gpu`; it ends after `steps` steps.

    A step is one of a torch.optim optimizer. The script sees no network; weights that are not on this machine are
    random ones of the same shape. Raises ConfigError where the script fails, or puts nothing on the card.
    """
    if not script.is_file():
        raise ConfigError(f"there is no script {quoted(str(script), 200)}")
    if steps < 1:
        raise ConfigError(f"--steps must be 1 or more; got {steps}")
    spec, target_bytes = checked_card(gpu, target_vram)
    with mock.patch.dict(os.environ, _OFFLINE), _hub_offline():
        from autofit.fakegpu import fake_gpu
        from autofit.hardware.calibration import host_costs

        costs, _ = host_costs(f"sim:{spec.name}")
        with fake_gpu(spec, host_costs=costs, enforce_capacity=False) as card:
            loop = CheckedLoop(card)
            _run(script, list(arguments), card, loop, steps)
            return loop.result(target_bytes)


def _run(script: Path, arguments: list[str], card: "FakeGpu", loop: CheckedLoop, steps: int) -> None:
    import torch

    asked: list[str] = []  # hosts that the script wanted to reach
    here = [str(script.resolve().parent), *sys.path]
    try:
        with (
            mock.patch.object(sys, "argv", [str(script), *arguments]), mock.patch.object(sys, "path", here),
            _without_network(asked), _weights_stood_in(script, card), _counted(card, loop, steps),
        ):  # fmt: skip
            runpy.run_path(str(script), run_name="__main__")
    except _Enough:
        pass
    except torch.OutOfMemoryError as error:
        loop.out_of_memory = str(error)
    except SystemExit as error:
        if error.code not in (None, 0) and not loop.steps:
            raise ConfigError(f"{script} ended with the exit code {error.code} before its first step") from error
    except ConfigError:
        raise
    except Exception as error:  # whatever a stranger's code raises
        wanted = f"; it wanted to reach {', '.join(dict.fromkeys(asked))}, and sees no network here" if asked else ""
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"{script} failed after {loop.steps} steps: {type(error).__name__}: {quoted(str(error), 300)} "
            f"({place.filename}:{place.lineno}){wanted}; what it reads must be on this machine"
        ) from error
    if not card.peak_allocated_bytes:
        raise ConfigError(f'{script} put nothing on the card; a script trains on it with device "cuda"')
    if not loop.steps:
        card.note("no step of a torch.optim optimizer was seen, so the peak is that of the whole script")
    elif loop.steps < 2:
        card.note("one step only: optimizer state made at its end is not yet there at the peak; --steps 2 shows it")


@contextmanager
def _counted(card: "FakeGpu", loop: CheckedLoop, steps: int) -> Iterator[None]:
    """Count the optimizer's steps, each a phase of the card, and end the script after the last."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    with ExitStack() as phases:
        phases.enter_context(card.phase("step 1 and before"))
        began_s = card.elapsed_s

        def after_step(optimizer: "torch.optim.Optimizer", args: object, kwargs: object) -> None:
            nonlocal began_s
            loop.steps += 1
            loop.step_s, began_s = card.elapsed_s - began_s, card.elapsed_s
            if loop.steps >= steps:
                raise _Enough
            phases.close()
            phases.enter_context(card.phase(f"step {loop.steps + 1}"))

        handle = register_optimizer_step_post_hook(after_step)
        try:
            yield
        finally:
            handle.remove()


@contextmanager
def _hub_offline() -> Iterator[None]:
    """The hub's library read the environment when it was imported, and would try again for a minute."""
    constants = sys.modules.get("huggingface_hub.constants")
    if constants is None:
        yield
        return
    with mock.patch.object(constants, "HF_HUB_OFFLINE", True):
        yield


@contextmanager
def _without_network(asked: list[str]) -> Iterator[None]:
    """Refuse connections to other machines with a word, and write their names into `asked`."""
    connect, lookup = socket.socket.connect, socket.getaddrinfo

    def refuse(host: object) -> None:
        if isinstance(host, str) and not host.startswith(_LOCAL) and host != socket.gethostname():
            asked.append(host)
            raise ConnectionRefusedError(f"autofit fit-check runs a script without the network; it wanted {host}")

    def refused(self: socket.socket, address: Any) -> None:
        if isinstance(address, tuple):
            refuse(address[0])
        connect(self, address)

    def not_found(host: Any, *rest: Any, **named: Any) -> Any:
        refuse(host)
        return lookup(host, *rest, **named)

    with mock.patch.object(socket.socket, "connect", refused), mock.patch.object(socket, "getaddrinfo", not_found):
        yield


@contextmanager
def _weights_stood_in(script: Path, card: "FakeGpu") -> Iterator[None]:
    """Let transformers' Auto classes make random weights where those of a model are not on this machine."""
    text = script.read_text("utf-8", "replace")
    if not any(name in text for name in _LIBRARIES):
        yield
        return
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

    own = [c for c in (_BaseAutoModelClass, *_below(_BaseAutoModelClass)) if "from_pretrained" in vars(c)]
    with ExitStack() as patches:
        for kind in own:
            patches.enter_context(mock.patch.object(kind, "from_pretrained", _standing_in(vars(kind), card)))
        yield


def _below(kind: type) -> Iterator[type]:
    children: list[type] = kind.__subclasses__()
    for found in children:
        yield found
        yield from _below(found)


def _standing_in(names: Mapping[str, Any], card: "FakeGpu") -> Any:
    original = names["from_pretrained"]

    def from_pretrained(cls: Any, name: Any, *rest: Any, **named: Any) -> Any:
        try:
            return original.__get__(None, cls)(name, *rest, **named)
        except OSError:
            made = _random(cls, str(name), named)
            card.note(f"the weights of {name} are not on this machine: random ones of the same shape stand in")
            return made

    return classmethod(from_pretrained)


def _random(kind: Any, name: str, named: dict[str, Any]) -> Any:
    """A model of a name's config. Raises what finding its config raises, and ConfigError for quantised weights."""
    from autofit.plugin.models import model_config

    if named.get("quantization_config") or named.get("load_in_4bit") or named.get("load_in_8bit"):
        raise ConfigError(f"the weights of {name} are not on this machine, and quantised ones have no stand-in here")
    config = named.get("config") or model_config(name, trust_remote_code=bool(named.get("trust_remote_code")))
    dtype = named.get("dtype", named.get("torch_dtype"))
    wanted = {} if dtype in (None, "auto") else {"dtype": dtype}
    if "attn_implementation" in named:
        wanted["attn_implementation"] = named["attn_implementation"]
    made = kind.from_config(config, **wanted)
    place: Callable[[str], Any] = made.to
    return place("cuda") if named.get("device_map") else made
