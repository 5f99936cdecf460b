"""A training script of one's own, run unchanged on a simulated card for a few steps.

The script's own process ends after its last step by an exception that only `except BaseException` would hold up.
Importing this loads no torch.
"""

import logging
import os
import runpy
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from autofit.errors import ConfigError, quoted
from autofit.files import Scratch
from autofit.fitcheck import CheckedLoop, FitCheck, checked_card
from autofit.plugin.protocol import MOST_PROMPT_TOKENS
from autofit.scripts.notebook import SUFFIX as NOTEBOOK
from autofit.scripts.notebook import code_of

if TYPE_CHECKING:
    import torch

    from autofit.fakegpu import FakeGpu

_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "disabled"}
_LIBRARIES = ("transformers", "trl", "peft", "unsloth")  # they load models by name, and train with TrainingArguments
_LOCAL = ("127.", "localhost", "::1")


class _Enough(BaseException):
    """The steps that were asked for are done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script or notebook with its arguments, and what is said in place of what is not on this machine.

    `prompt_tokens` is the length of made-up samples where data are missing. `changes` are laid over every
    TrainingArguments that the script makes.
    """

    path: Path
    arguments: Sequence[str] = ()
    prompt_tokens: int | None = None
    changes: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptCheck:
    """What a script takes on a card, and the values of its TrainingArguments that advice may change, if it has any."""

    found: FitCheck
    arguments: Mapping[str, Any]


def fit_script(
    script: Script, *, gpu: str, steps: int = 2, target_vram: str | int | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> ScriptCheck:  # fmt: skip
    """Peak memory by step, and step time, of a script on the simulated card `gpu`; it ends after `steps` steps.

    A step is one of a torch.optim optimizer. The script sees no network; weights that are not on this machine are
    random ones of the same shape. Raises ConfigError where the script fails, or puts nothing on the card.
    """
    code = code_of(script.path)
    if steps < 1:
        raise ConfigError(f"--steps must be 1 or more; got {steps}")
    if script.prompt_tokens is not None and not 1 <= script.prompt_tokens <= MOST_PROMPT_TOKENS:
        raise ConfigError(f"--prompt-tokens must be from 1 to {MOST_PROMPT_TOKENS:,}; got {script.prompt_tokens}")
    spec, target_bytes = checked_card(gpu, target_vram)
    count = f"{steps} step{'s' if steps > 1 else ''}"
    tell(f"{script.path} runs on a simulated {spec.name}, {count}; its own output follows")
    with mock.patch.dict(os.environ, _OFFLINE), _hub_offline(), Scratch("script-") as folder:
        from autofit.fakegpu import fake_gpu
        from autofit.hardware.calibration import host_costs

        costs, _ = host_costs(f"sim:{spec.name}")
        with fake_gpu(spec, host_costs=costs, enforce_capacity=False) as card:
            loop = CheckedLoop(card)
            seen = _run(script, code, card, loop, steps=steps, folder=folder)
            return ScriptCheck(found=loop.result(target_bytes), arguments=seen)


def _run(script: Script, code: str, card: "FakeGpu", loop: CheckedLoop, *, steps: int, folder: Path) -> dict[str, Any]:
    """Run the script; returns what was seen of its TrainingArguments. A notebook's code lies in `folder`."""
    import torch

    asked, seen = list[str](), dict[str, Any]()  # hosts that the script wanted to reach, and its arguments
    path = file = script.path
    if path.suffix == NOTEBOOK:
        file = folder / "notebook.py"
        file.write_text(code, encoding="utf-8")
    here = [str(path.resolve().parent), *sys.path]
    try:
        with (
            mock.patch.object(sys, "argv", [str(path), *script.arguments]), mock.patch.object(sys, "path", here),
            _without_network(asked), _stood_in(script, code, card, seen, folder), _counted(card, loop, steps),
        ):  # fmt: skip
            runpy.run_path(str(file), run_name="__main__")
    except _Enough:
        pass
    except torch.OutOfMemoryError as error:
        loop.out_of_memory = str(error)
    except SystemExit as error:
        if error.code not in (None, 0) and not loop.steps:
            raise ConfigError(f"{path} ended with the exit code {error.code} before its first step") from error
    except ConfigError:
        raise
    except Exception as error:  # whatever a stranger's code raises
        wanted = f"; it wanted to reach {', '.join(dict.fromkeys(asked))}, and sees no network here" if asked else ""
        frames = traceback.extract_tb(error.__traceback__)
        place = ([frame for frame in frames if frame.filename == str(file)] or frames)[-1]
        shown = path if place.filename == str(file) else place.filename
        raise ConfigError(
            f"{path} failed after {loop.steps} steps: {type(error).__name__}: {quoted(str(error), 300)} "
            f"({shown}:{place.lineno}){wanted}; what it reads must be on this machine"
        ) from error
    if not card.peak_allocated_bytes:
        raise ConfigError(f'{path} put nothing on the card; a script trains on it with device "cuda"')
    if not loop.steps:
        card.note("no step of a torch.optim optimizer was seen, so the peak is that of the whole script")
    elif loop.steps < 2:
        card.note("one step only: optimizer state made at its end is not yet there at the peak; --steps 2 shows it")
    return seen


@contextmanager
def _stood_in(script: Script, code: str, card: "FakeGpu", seen: dict[str, Any], folder: Path) -> Iterator[None]:
    """Context with stand-ins for models and data that are not here, and the changes, where the code may need them."""
    with ExitStack() as stack:
        log = logging.getLogger("bitsandbytes")  # it warns of slow kernels of the CPU, which are not used here
        stack.callback(log.setLevel, log.level)
        log.setLevel(logging.ERROR)
        if any(name in code for name in _LIBRARIES):
            from autofit.scripts.changes import laid_over
            from autofit.scripts.older import understood
            from autofit.scripts.stand_ins import StandIns

            stack.enter_context(StandIns(folder, card.note).in_place())
            stack.enter_context(understood(code, card.note))
            stack.enter_context(laid_over(script.changes, seen))
        if "datasets" in code or "trl" in code:
            from autofit.scripts.data import Columns, stood_in

            stack.enter_context(stood_in(Columns(code), script.prompt_tokens, card.note))
        yield


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
