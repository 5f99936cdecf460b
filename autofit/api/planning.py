"""From the arguments of a search to its plan: the device and target, the recipe, the space of candidates."""

import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from autofit.api.arguments import one_of, seconds, share, size
from autofit.api.events import Event, OnEvent, silent
from autofit.api.reading import Given, check_cards, check_prompt_tokens, describe_device, read_recipe, source_of, suited
from autofit.cluster.nodes import NodeCards, asks_for_cards, cards_of_nodes, check_count, named_cards
from autofit.cluster.scheduler import LOCAL, Executor
from autofit.errors import ConfigError, at_least_one, option
from autofit.files import claim
from autofit.frontends.writing import changed, in_16_bits
from autofit.hardware.hardware import NO_NEEDS, CardNeeds, about_choice, choose_device_and_target, choose_target, gpus
from autofit.hardware.health import compiling_faults
from autofit.probing.fork_server import ForkServer
from autofit.probing.slots import check_cuda
from autofit.recipe.keys import TIERS, Tier
from autofit.recipe.launch import Launch
from autofit.recipe.launching import NO_OPTIONS, LaunchOptions
from autofit.recipe.recipe import Recipe
from autofit.space.knob import StatedSpace, read_space, space_knobs
from autofit.space.space import QUANTIZATION, Knob, Space
from autofit.space.traits import describe_left_out
from autofit.tuning.frontier import GOALS, Goal
from autofit.tuning.sampler import SAMPLERS, SamplerName
from autofit.tuning.search import Plan
from autofit.units import format_bytes

DeviceKind = Literal["auto", "cpu", "cuda", "sim"]
_DEVICES: tuple[DeviceKind, ...] = ("auto", "cpu", "cuda", "sim")
_JOBS_AT_ONCE = 4
_IN_4_BITS = 0.53  # bytes of a parameter, with the scales of its block
_TRIALS = 12  # of a search that no time or plateau ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Arguments of `autofit.search`, as they were given; its docstring explains each."""

    recipe: Given | None
    name: str | None
    target_vram: str | float | None
    headroom: str | float | None
    device: DeviceKind
    gpu: str | None
    trainer: str | None
    space: StatedSpace | None
    allow: Tier
    changes: Mapping[str, object] | None
    prompt_tokens: int | None
    trials: int | None
    time_budget: str | float | None
    plateau: int | None
    min_gain: str | float
    goal: Goal
    sampler: SamplerName
    measured_steps: int
    deadline: str | float
    parallel: int | None
    seed: int
    study: str | None
    folder: Path
    launch: LaunchOptions = NO_OPTIONS
    executor: Executor = LOCAL

    def check(self) -> None:
        """Raise ConfigError for errors that are independent of the recipe and the machine."""
        if self.recipe is None and self.device in ("cpu", "cuda"):
            raise ConfigError(
                f"the built-in baseline has synthetic prompts and runs on a simulated card; give a recipe or leave "
                f"{option('device', self.device)} out"
            )
        for name in ("trials", "plateau", "measured_steps", "parallel", "prompt_tokens"):
            at_least_one(name.replace("_", "-"), getattr(self, name))
        for name, known in (("device", _DEVICES), ("allow", TIERS), ("goal", GOALS), ("sampler", SAMPLERS)):
            one_of(name, getattr(self, name), known)
        if self.study is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", self.study):
            raise ConfigError(
                f"{option('study')} names a folder: a letter or digit, then also '.', '_', '-'; got {self.study!r}"
            )
        self.launch.check()


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan, and the inputs of it that the search needs again."""

    plan: Plan
    knobs: tuple[Knob, ...]  # of every tier
    scratch: Path  # holds the worst case until the study has it


def make_plan(asked: Request, server: ForkServer, on_event: OnEvent = silent) -> Planned:
    """The plan of a search. Raises ConfigError for an impossible card, recipe, space or target."""
    budget_s = seconds("time-budget", asked.time_budget)
    deadline_s = seconds("deadline", asked.deadline) or 0
    node = _node_cards(asked, on_event)
    device, target = _device_and_target(asked, node)  # reports a wrong one at once
    check_prompt_tokens(asked.prompt_tokens, device)
    _headroom(asked.headroom, device, target)
    if device == "cuda" and node is None:
        _check_cards(asked, server, on_event)
    own, device, target, needs = suited(
        changed(source_of(asked.recipe, asked.name, asked.launch), asked.changes),
        partial(_device_and_target, asked, node), bfloat16=node is not None,
    )  # fmt: skip
    headroom = _headroom(asked.headroom, device, target)
    if asked.space is not None:
        read_space(asked.space, trainer=None)  # reports a wrong one at once
    one = f"{own.source.name}-{os.getpid()}-{threading.get_native_id()}"  # of several that read a recipe at once
    scratch = asked.folder / "inspections" / re.sub(r"[^A-Za-z0-9._-]+", "-", one)
    claim(scratch)
    recipe = read_recipe(
        own, trainer=asked.trainer, device=device, scratch=scratch, server=server, prompt_tokens=asked.prompt_tokens,
        launch=asked.launch, say=lambda text: on_event(Event(text=text)),
    )  # fmt: skip
    if node is None:
        check_cards(recipe, device)
    else:
        check_count(node.cards, recipe.launch.cards)
    choice = about_choice(device, asked.gpu, size("target-vram", asked.target_vram), needs)
    choice = choice if node is None else f"{node.kind}, on the nodes of the cluster; no other kind takes a probe"
    card = [("card", choice)] if choice else []
    for label, text in (*recipe.describe(), *card):
        on_event(Event(label=label, text=text))
    on_event(Event(label="device", text=describe_device(device, target, recipe.launch.cards), read=True))
    knobs = space_knobs(recipe, asked.space)
    space = Space.of(recipe, knobs, allow=asked.allow, device=device, card=None if node is None else node.kind)
    if space.left_out:
        on_event(Event(label="left out", text=describe_left_out(space.left_out)))
    _check_target(space, target - headroom)
    open_ended = budget_s is not None or asked.plateau is not None
    plan = Plan(
        recipe=recipe, space=space, folder=asked.folder, device=device, target_bytes=target, headroom_bytes=headroom,
        study_name=asked.study, max_trials=asked.trials or (None if open_ended else _TRIALS), budget_s=budget_s,
        plateau_trials=asked.plateau, sampler=asked.sampler, goal=asked.goal,
        min_gain_frac=share("min-gain", asked.min_gain) or None,
        parallel=_at_once(asked, device, recipe.launch.cards),
        measured_steps=asked.measured_steps, deadline_s=deadline_s, seed=asked.seed,
        executor=asked.executor, card=None if node is None else node.kind,
    )  # fmt: skip
    return Planned(plan=plan, knobs=knobs, scratch=scratch)


def _check_cards(asked: Request, server: ForkServer, on_event: OnEvent) -> None:
    """Refuse cards on which CUDA fails to start, or others compute; report faults, cards left out and missing parts."""
    look = check_cuda(server, asked.folder)
    for line in (*look.refused, *look.faults, compiling_faults()):
        if line:
            _say_of_card(on_event, line)


def _node_cards(asked: Request, on_event: OnEvent) -> NodeCards | None:
    """The cards of the cluster's nodes that the search is for; None if it is for this machine's, or for none."""
    executor, device = asked.executor, asked.device
    if not executor.is_cluster or asked.recipe is None:
        return None
    if device == "auto" and asked.gpu is None and asks_for_cards(executor):
        device = "cuda"
    if device != "cuda":
        return None
    if asked.gpu is not None:
        return named_cards(asked.gpu, executor)
    say = partial(_say_of_card, on_event)
    return cards_of_nodes(executor, asked.folder / "cluster", say=say)


def _say_of_card(on_event: OnEvent, text: str) -> None:
    on_event(Event(label="card", text=text))


def _device_and_target(asked: Request, node: NodeCards | None, needs: CardNeeds = NO_NEEDS) -> tuple[str, int]:
    """(device for probes, target in bytes). Raises ConfigError."""
    asked_bytes = size("target-vram", asked.target_vram)
    if node is not None:
        return "cuda", choose_target(asked_bytes, "cuda", node.cards)
    simulated = asked.device == "auto" and asked.gpu is None and (asked.recipe is None or asked.executor.is_cluster)
    return choose_device_and_target("sim" if simulated else asked.device, asked.gpu, asked_bytes, needs)


def _headroom(given: str | float | None, device: str, target_bytes: int) -> int:
    headroom = 0 if device == "cpu" else target_bytes // 50
    if given is not None:
        headroom = 0 if given in ("0", "0B", 0) else size("headroom", given) or 0
    if headroom >= target_bytes:
        raise ConfigError(
            f"{option('headroom')} must be below the target of {format_bytes(target_bytes)}; got "
            f"{format_bytes(headroom)}"
        )
    return headroom


def _at_once(asked: Request, device: str, cards: int) -> int:
    """The probes at once that are asked for; a terminal has one, and on a cluster each has a job of its own."""
    if asked.executor.kind == "debug":
        return 1
    return asked.parallel or (_JOBS_AT_ONCE if asked.executor.is_cluster else _probes_at_once(device, cards))


def _probes_at_once(device: str, cards: int) -> int:
    """Number of probes at once: the machine's cards over `cards`, those of one probe; simulated ones share the CPU.

    On the CPU a second would slow the first.
    """
    if device.startswith("sim:"):
        return min(4, os.cpu_count() or 1)
    return max(1, len(gpus()) // cards) if device == "cuda" else 1


def _check_target(space: Space, limit_bytes: int) -> None:
    """Refuse a target below the bytes of the weights alone, at the fewest bits that a candidate gives them."""
    recipe = space.recipe
    weights, parameters = recipe.weights_bytes, recipe.model_parameters
    if weights is None or parameters is None:
        return
    choices = {knob.name: values for knob, values in zip(space.knobs, space.choices, strict=True)}
    of_each: float | None = 2 if "bfloat16" in choices.get("dtype", ()) else None
    of_each = _IN_4_BITS if "4bit" in choices.get(QUANTIZATION, ()) else of_each
    least = weights if of_each is None else min(weights, int(of_each * parameters))
    least = 0 if recipe.launch.offload == "parameters" else least // recipe.launch.shares_of_weights
    if least > limit_bytes:
        raise ConfigError(
            f"{option('target-vram')} less the headroom must hold at least {_whose(recipe.launch)} weights of "
            f"{format_bytes(least)} (dtype {recipe.resolved.get('dtype')}); got {format_bytes(limit_bytes)}; raise it"
            f"{_or_less(recipe, limit_bytes)}"
        )


def _whose(launch: Launch) -> str:
    return "the model's" if launch.shares_of_weights == 1 else f"a card's share, of {launch.shares_of_weights}, of the"


def _or_less(recipe: Recipe, limit_bytes: int) -> str:
    """Ways to make the weights smaller, as the end of a sentence; "" if the recipe or its tool's file has none."""
    ways = list[str]()
    if recipe.resolved.get("dtype") in (None, "float32") and (words := in_16_bits(recipe.foreign)):
        ways.append(f"set {words}")
    in_4_bits = None if recipe.model_parameters is None else _IN_4_BITS * recipe.model_parameters
    if in_4_bits is not None and in_4_bits < limit_bytes and recipe.resolved.get("use_peft") and not recipe.foreign:
        ways.append(f"load them in 4 bits ({option('allow')} recipe)")
    return "".join(f", or {way}" for way in ways)
