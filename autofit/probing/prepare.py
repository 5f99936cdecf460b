"""From a given recipe to a Recipe: its trainer interprets it once, before any probe, in a child of the fork server.

A child, because trainers import torch and may import the user's code: `inspect` and `tell_lengths` run there.
"""

import contextlib
import os
import shutil
import signal
import sysconfig
import traceback
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import cast

import psutil

from autofit.errors import ConfigError, EnvironmentFault, UnknownKeyError, nearest, one_line, option
from autofit.fakegpu.specs import CARDS_OF_A_MACHINE
from autofit.files import OWNER, is_full, last_line, read_json, write_json, written_json
from autofit.frontends.writing import in_own_names, own_words, wrong_with
from autofit.hardware.hardware import gpus
from autofit.plugin.protocol import Facts, Inspection, Trainer, WorstCase
from autofit.plugin.registry import check_early, code_hash, load
from autofit.probing.fork_server import ForkServer
from autofit.probing.host_memory import shortage
from autofit.probing.supervise import ProcessEnding
from autofit.recipe.keys import LAUNCH
from autofit.recipe.launch import check_installed, check_on_cpu, split
from autofit.recipe.launching import NO_OPTIONS, LaunchOptions, launched, needs_server
from autofit.recipe.profile import profile
from autofit.recipe.recipe import Recipe, TrainerName, merge, sizes_of_ranks, spread, with_launch
from autofit.recipe.secrets import opened, sealed, without_secrets
from autofit.recipe.yaml_file import Source, read_source

_INSPECTION_S = 900.0  # tokenizing a large dataset takes minutes
_LENGTHS_S = 60.0  # for some of its samples, which take a second or two


def worst_case_path(folder: Path) -> Path:
    """The path of the file that holds the row with the longest prompt."""
    return folder / "worst_case.json"


def prepare(
    given: Path | Source, *, trainer: TrainerName, device: str, folder: Path, server: ForkServer,
    launch: LaunchOptions = NO_OPTIONS, changes: Mapping[str, object] | None = None, prompt_tokens: int | None = None,
    trains: bool = True,
) -> Recipe:  # fmt: skip
    """The recipe that was `given`, with `changes` applied; writes the worst-case row to `folder`.

    `launch` has the options of the launch besides the recipe. On a simulated card `prompt_tokens` replaces the
    dataset: a synthetic prompt of that length is the worst case. A recipe that is only read (`trains` is False) needs
    no library of its launch. Raises ConfigError for a recipe that TRL would refuse.
    """
    source = given if isinstance(given, Source) else read_source(given)
    values = sealed(merge(source.values, changes or {}))
    read = launched(values, launch, of=profile(trainer), own=source.launch)
    changed = [key.partition(".")[0] for key in changes or {}]
    if trains and device == "cpu":
        check_on_cpu(read.launch)
    elif trains:
        check_installed(read.launch)
    check_early(
        source, read.values, trainer=trainer, device=device, changed=changed, prompt_tokens=prompt_tokens,
        ranks=read.launch.ranks,
    )  # fmt: skip
    answer_path = folder / "inspection.json"
    answer_path.unlink(missing_ok=True)
    request = {
        "trainer": trainer, "values": dict(read.values), "changed": [key for key in changed if key in read.values],
        "device": device, "prompt_tokens": prompt_tokens, "ranks": read.launch.ranks, "cards": launch.gpus,
        "worst_case": str(worst_case_path(folder)), "answer": str(answer_path),
    }  # fmt: skip
    write_json(folder / "inspect.json", request)
    log = folder / "inspection.log"
    ending = server.call({
        "entry": "autofit.probing.prepare:inspect", "argument": str(folder / "inspect.json"), "cwd": str(Path.cwd()),
        "log": str(log), "env": _one_card(), "deadline_s": _INSPECTION_S,
    })  # fmt: skip
    answer = read_json(answer_path)
    if answer is None and is_full(folder):
        raise EnvironmentFault(
            f"no space left to write {answer_path}; free some space or choose another folder with {option('dir')}"
        )
    if answer is None:
        raise EnvironmentFault(f"reading {source.what} {_end_of(ending)}{last_words(log)}")
    if "error" in answer:
        kind = UnknownKeyError if answer.get("of_key") else ConfigError
        said = in_own_names(source.foreign, str(answer["error"])) + (last_words(log) if answer.get("printed") else "")
        raise kind(said if answer.get("of_trainer") else f"{source.what}: {said}")
    facts = Facts.from_json(answer)
    missing = [key for key in facts.keys.to_json().values() if key is not None and key not in facts.resolved]
    if missing:
        raise ConfigError(
            f"the trainer {trainer} names {', '.join(missing)} in its BatchKeys, and its recipes have no such key"
            f"{nearest(missing[0], facts.resolved)}"
        )
    if trains and device == "cuda" and needs_server(facts.resolved, facts.values):
        raise ConfigError(
            f"{source.what}: vllm_mode: server needs a server that no probe starts, so such a recipe is only "
            f"simulated: give {option('gpu', 'NAME')}, such as {option('gpu', 'h100')} (promote starts the server), or "
            "start one and name it with vllm_server_base_url, or set vllm_mode: colocate"
        )
    how = read.launch.batching(facts.resolved, facts.keys)
    shared: dict[str, object] = {} if how.is_plain else {LAUNCH: how.to_values()}
    short: tuple[str, ...] = ()
    if device == "cuda" and gpus():  # else the card is in another machine, whose memory is not known
        short = shortage(how, facts.weights_bytes or 0, psutil.virtual_memory().total)
    told = {each.name: getattr(facts, each.name) for each in fields(facts)}  # each is one of the recipe's
    told |= {"name": source.name, "space": Path(facts.space), "content_hash": facts.content_hash + code_hash(trainer)}
    told |= {name: {**getattr(facts, name), **shared} for name in ("values", "resolved")}
    told["notes"] = (*source.notes, *read.notes, *facts.notes, *short)
    recipe = Recipe(
        **told, trainer=trainer, trainer_name=facts.name, launch=how, foreign=source.foreign, stated=dict(read.values)
    )
    if launch.gpus is None:
        return recipe
    return _said_in_file(on_machines(_on_cards(recipe, launch.gpus), launch.machines, device), recipe)


def sample_lengths(recipe: Recipe, folder: Path, server: ForkServer, *, most: int) -> dict[str, object] | None:
    """The trainer's figures on the lengths of `most` samples of the data that an inspection into `folder` has read.

    None if the data is out of reach, or its trainer reports nothing of it, or fails.
    """
    if recipe.num_samples is None:
        return None
    answer = folder / "lengths.json"
    request = {"trainer": recipe.trainer, "values": dict(recipe.values), "folder": str(folder), "most": most,
               "answer": str(answer)}  # fmt: skip
    write_json(folder / "sample_lengths.json", request)
    server.call({
        "entry": "autofit.probing.prepare:tell_lengths", "argument": str(folder / "sample_lengths.json"),
        "cwd": str(Path.cwd()), "log": str(folder / "lengths.log"), "env": _one_card(),
        "deadline_s": _LENGTHS_S,
    })  # fmt: skip
    found = (read_json(answer) or {}).get("found")
    return cast("dict[str, object] | None", found)


def _said_in_file(recipe: Recipe, before: Recipe) -> Recipe:
    """`recipe` with a note of what its file must say of its cards, where its tool reads their number there.

    `before` is as the file has it.

    Raises ConfigError where the tool refuses the file with that number.
    """
    own, launch, origin = before.launch, recipe.launch, recipe.foreign
    changes: dict[str, object] = {**own.changed_to(launch.ranks, launch.machines)}
    if not origin or not profile(recipe.trainer).own_launch or not changes:
        return recipe
    said = own_words(origin, changes := {**changes, **sizes_of_ranks(recipe, before)})
    if wrong := wrong_with(origin, changes):
        raise ConfigError(f"{Path(str(origin['path'])).name} with {said}: {'; '.join(wrong)}")
    return replace(recipe, notes=(*recipe.notes, f"the file says {own.ranks} GPUs; for {launch.ranks} set {said}"))


def on_machines(recipe: Recipe, machines: int | None, device: str) -> Recipe:
    """`recipe` with its ranks on `machines`; None: as its launch says, and simulated ones on machines of 8."""
    ranks, notes = recipe.launch.ranks, recipe.notes
    if machines is None and device.startswith("sim:") and recipe.launch.machines == 1 and ranks > CARDS_OF_A_MACHINE:
        machines = ranks // CARDS_OF_A_MACHINE if ranks % CARDS_OF_A_MACHINE == 0 else 1
        notes = (*notes, f"{ranks} ranks are taken as {machines} machine(s); --gpu 2x8xNAME says 2 of 8 cards")
    if machines in (None, recipe.launch.machines):
        return replace(recipe, notes=notes)
    return with_launch(replace(recipe, notes=notes), replace(recipe.launch, machines=machines))


def _end_of(ending: ProcessEnding) -> str:
    """Reason why the process that read a recipe ended before answering, in words."""
    if ending.deadline_passed:
        return f"took more than {_INSPECTION_S:.0f} s"
    if ending.kernel_oom:
        return "was ended by the kernel, as the machine had no memory left"
    if ending.exit_code < 0:
        return f"crashed its process ({signal.Signals(-ending.exit_code).name})"
    return f"ended with exit code {ending.exit_code}, from its trainer or code that it names"


def last_words(log: Path) -> str:
    """The last printed line, as `: "set MY_KEY first"`; "" if it is missing. The log is deleted with its folder."""
    line = last_line(log)
    return f"; it printed last: {without_secrets(one_line(line, 200))}" if line else ""


def _one_card() -> dict[str, str]:
    """The variable that leaves the child one of the cards: with several, transformers would train by nn.DataParallel.

    TRL's SFT, DPO and reward trainers refuse that, and the inspection makes them, for a simulated card too.
    """
    try:
        cards = gpus()
    except ConfigError:  # told where a card is chosen
        return {}
    return {"CUDA_VISIBLE_DEVICES": cards[0].uuid} if cards else {}


def _on_cards(recipe: Recipe, cards: int) -> Recipe:
    """`recipe` on as many `cards`, at the effective batch that it has as written.

    A vLLM server whose cards are not said gets the fewest that leave ranks which divide the batch.
    """
    if recipe.launch.server_ranks == 0 and _has_server(recipe) and cards > 1:
        recipe = _with_server(recipe, cards)
    ranks = cards - recipe.launch.server_ranks
    if ranks < 1:
        raise ConfigError(
            f"{option('gpus')} must be more than the {recipe.launch.server_ranks} of the vLLM server; got {cards}"
        )
    return spread(recipe, ranks)


def _has_server(recipe: Recipe) -> bool:
    return recipe.resolved.get("use_vllm") is True and recipe.resolved.get("vllm_mode") == "server"


def _with_server(recipe: Recipe, cards: int) -> Recipe:
    for servers in range(1, cards):
        with contextlib.suppress(ConfigError):
            spread(recipe, cards - servers)
            launch = replace(recipe.launch, server_ranks=servers)
            note = f"vllm_mode server: {servers} of the {cards} cards serve (--set launch.server_ranks=N chooses)"
            return with_launch(replace(recipe, notes=(*recipe.notes, note)), launch)
    return recipe


def keep_worst_case(source: Path, target: Path) -> None:
    """Move the files that probes need from the inspection folder `source` to `target`.

    Does nothing if an earlier run of the study has moved them.
    """
    target.mkdir(parents=True, exist_ok=True)
    if worst_case_path(target).exists():  # the same study has the same worst case
        return
    own = {"inspect.json", "inspection.json", "inspection.log", "forecasts", OWNER, worst_case_path(source).name}
    for path in [p for p in source.iterdir() if p.name not in own]:
        if (target / path.name).is_dir():
            shutil.rmtree(target / path.name)
        os.replace(path, target / path.name)
    os.replace(worst_case_path(source), worst_case_path(target))  # last: its presence marks the move as complete


# -- in the child -----------------------------------------------------------------------------------------------------


def inspect(request_path: str) -> int:
    """Inspect the recipe of the request at `request_path` and write the request's `answer` file. Always returns 0."""
    request = written_json(request_path)
    inspection = Inspection(
        device=str(request["device"]), worst_case=WorstCase(path=Path(str(request["worst_case"]))),
        prompt_tokens=cast(int | None, request.get("prompt_tokens")),
        changed=tuple(cast(list[str], request["changed"])), ranks=cast(int, request.get("ranks", 1)),
        cards=cast("int | None", request.get("cards")),
    )  # fmt: skip
    answer: dict[str, object]
    try:
        trainer = load(str(request["trainer"]))
    except ConfigError as error:
        answer = {"error": error.marked, "of_trainer": True}
    except (SystemExit, KeyboardInterrupt) as error:
        said = f"the trainer {request['trainer']!r} ended the import {_exit_of(error)}"
        answer = {"error": said, "of_trainer": True, "printed": not _has_words(error)}
    else:
        answer = _facts_of(trainer, cast(dict[str, object], request["values"]), inspection)
    write_json(Path(str(request["answer"])), answer)
    return 0


def tell_lengths(request_path: str) -> int:
    """The lengths of some samples of the recipe's data, of a trainer that tells them; writes the `answer`. Returns 0.

    `request` is that of an inspection that has ended: its data is at hand, so nothing is fetched.
    """
    request = written_json(request_path)
    tells = getattr(load(str(request["trainer"])), "sample_lengths", None)
    from autofit.plugin.models import go_offline  # imports torch

    go_offline()
    values = split(opened(cast(dict[str, object], request["values"])))[1]
    found = None if tells is None else tells(values, Path(str(request["folder"])), most=cast(int, request["most"]))
    write_json(Path(str(request["answer"])), {"found": found})
    return 0


def _exit_of(error: SystemExit | KeyboardInterrupt) -> str:
    """Way in which code of the user's ended its process, in words."""
    if isinstance(error, KeyboardInterrupt):
        return "by KeyboardInterrupt"
    return f"by sys.exit({'' if error.code is None else repr(error.code)[:300]})"


def _has_words(error: SystemExit | KeyboardInterrupt) -> bool:
    """True if the exit gives its reason; else the text printed before it may."""
    return isinstance(error.args[0] if error.args else None, str)


def _facts_of(trainer: Trainer, values: dict[str, object], inspection: Inspection) -> dict[str, object]:
    """The facts of the recipe `values` as JSON, or the reason why they are missing."""
    try:
        facts = trainer.inspect(opened(values), inspection)
        return replace(facts, values=sealed(facts.values), resolved=sealed(facts.resolved)).to_json()
    except ConfigError as error:
        return {"error": error.marked, "of_key": isinstance(error, UnknownKeyError)}
    except (SystemExit, KeyboardInterrupt) as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames if not _is_librarys(frame.filename)]
        where = f" ({own[-1]})" if own else ""
        said = f"its trainer, or code that it names (rewards, tools), ended {_exit_of(error)}{where}"
        return {"error": said, "printed": not _has_words(error)}
    except Exception as error:  # of the trainer's own code, which may be anyone's
        traceback.print_exc()
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return {"error": f"the trainer {trainer.name} failed on it: {text} ({Path(last.filename).name}:{last.lineno})"}


def _is_librarys(file: str) -> bool:
    """True if a source file is Python's own or of an installed package."""
    return "site-packages" in file or file.startswith(("<frozen", sysconfig.get_path("stdlib")))
