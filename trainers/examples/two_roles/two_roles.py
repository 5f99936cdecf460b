"""An agent and a frozen user model through TRL's `rollout_func`: one model on one device plays both roles.

The agent is the model with its adapter; the user is the same model with the adapter switched off, so it stays as it was
before training and costs no memory of its own. They take turns, and a talk is one completion: the agent's tokens are
trained on, the user's and the markers between them are masked (`env_mask`).

The model is placed by the trainer, on its own device: `device_map` is refused, as a model spread over cards by `auto`
is neither the one that the trainer steps nor where its inputs are.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from trl import GRPOTrainer

from autofit.errors import ConfigError
from autofit.plugin.protocol import Facts, Inspection
from autofit.trainers.grpo import GrpoTrainer
from autofit.trainers.own_keys import OwnKeys
from autofit.trainers.trl import TrlRun
from autofit.trainers.trl_config import TrlConfig

Ids = list[int]


@dataclass(frozen=True)
class Settings:
    """The keys of a recipe besides those of `trl grpo`."""

    turns: int = 2  # of the agent; the user speaks between them
    user_tokens: int = 32  # at most, each time the user speaks
    user_prompt: str = "You are a customer. You want {goal}. Say it in a sentence.\n"
    user_marker: str = "\nCustomer:"
    agent_marker: str = "\nClerk:"


class TwoRoles(OwnKeys, GrpoTrainer):  # type: ignore[misc]
    settings = Settings

    def inspect(self, values: Mapping[str, object], inspection: Inspection) -> Facts:
        facts: Facts = super().inspect(values, inspection)
        _check(facts.resolved)
        return facts

    def run(self, trainer: Any, config: TrlConfig, tokens_per_step: int | None = None) -> TrlRun:
        if trainer.rollout_func is None:  # a gradient proof brings its own
            trainer.rollout_func = partial(_talk, own=self.own(config), goals=_goals(trainer))
        return super().run(trainer, config, tokens_per_step)


def _check(resolved: Mapping[str, Any]) -> None:
    """Raise ConfigError unless one model can play both roles where the trainer puts it."""
    wrong = []
    if not resolved.get("use_peft"):
        wrong.append("use_peft must be true: without an adapter to switch off, the user would learn too")
    if resolved.get("use_vllm"):
        wrong.append("use_vllm must be false: the user is the trainer's own model without its adapter")
    if "device_map" in (resolved.get("model_init_kwargs") or {}):
        wrong.append("model_init_kwargs must have no device_map: the trainer places the model")
    turns, length = int(resolved["turns"]), int(resolved["max_completion_length"])
    if turns < 1 or int(resolved["user_tokens"]) < 1:
        wrong.append("turns and user_tokens must be 1 or more")
    elif (least := turns + (turns - 1) * (int(resolved["user_tokens"]) + 16)) > length:
        wrong.append(f"max_completion_length must hold the whole talk, at least {least} tokens with turns={turns} and "
                     f"user_tokens={resolved['user_tokens']}; got {length}")  # fmt: skip
    if wrong:
        raise ConfigError("; ".join(wrong))


def _goals(trainer: Any) -> dict[str, str]:
    """{prompt: the user's goal} of the data; empty where it has no such column."""
    rows = trainer.train_dataset
    if "goal" not in rows.column_names:
        return {}
    return {str(prompt): str(goal) for prompt, goal in zip(rows["prompt"], rows["goal"], strict=True)}


def _talk(prompts: Sequence[Any], trainer: GRPOTrainer, *, own: Settings, goals: Mapping[str, str]) -> dict[str, Any]:
    """Answer that TRL wants of a rollout: the talk of each prompt as one completion, and whose tokens are whose."""
    tokenizer = trainer.processing_class

    def ids_of(text: str) -> Ids:
        found: Ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    to_user, to_agent = ids_of(own.user_marker), ids_of(own.agent_marker)
    begun: list[Ids] = [list(ids) for ids in trainer._tokenize_prompts(list(prompts))[0]]
    wanted = [goals.get(str(prompt), "help") for prompt in prompts]
    told = [ids_of(own.user_prompt.format(goal=goal)) for goal in wanted]
    between = len(to_user) + own.user_tokens + len(to_agent)
    left = trainer.max_completion_length
    talks: list[Ids] = [[] for _ in begun]
    masks: list[Ids] = [[] for _ in begun]

    def add(to: list[Ids], spoken: Sequence[Ids], mask: int) -> None:
        for talk, marks, ids in zip(to, masks, spoken, strict=True):
            talk.extend(ids)
            marks.extend([mask] * len(ids))

    for turn in range(own.turns):
        rest = own.turns - 1 - turn
        most = (left - rest * between) // (rest + 1)
        add(talks, _spoken(trainer, [b + t for b, t in zip(begun, talks, strict=True)], most), 1)
        left -= most
        if rest:
            heard = [user + _without_end(talk, trainer) + to_user for user, talk in zip(told, talks, strict=True)]
            with _as_user(trainer):
                answers = _spoken(trainer, heard, own.user_tokens)
            add(talks, [to_user + _without_end(ids, trainer) + to_agent for ids in answers], 0)
            left -= between
    return {"prompt_ids": begun, "completion_ids": talks, "logprobs": None, "env_mask": masks, "goal_of_user": wanted}


def _spoken(trainer: Any, contexts: list[Ids], most: int) -> list[Ids]:
    """At most `most` tokens that the model says after each of `contexts`, generated by the trainer's own means."""
    settings, usual = trainer.generation_config, trainer.generation_config.max_new_tokens
    settings.max_new_tokens = max(1, most)
    try:
        found: list[Ids] = trainer._generate_single_turn(contexts, None, {}, 1)[0]
    finally:
        settings.max_new_tokens = usual
    return found


def _without_end(ids: Ids, trainer: Any) -> Ids:
    """`ids` without end tokens, after which a model says nothing more."""
    return [token for token in ids if token not in trainer.eos_token_ids]


@contextmanager
def _as_user(trainer: Any) -> Iterator[None]:
    """The trainer's model without its adapter: what it was before training."""
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    with model.disable_adapter() if hasattr(model, "disable_adapter") else nullcontext():
        yield


def names_the_goal(completions: list[Any], goal: list[str], **_: Any) -> list[float]:
    """The share of the goal's words that the talk has: the agent found out what the user wants."""
    words = [set(wanted.lower().split()) for wanted in goal]
    said = [str(talk[-1]["content"] if isinstance(talk, list) else talk).lower().split() for talk in completions]
    return [len(wanted & set(text)) / max(1, len(wanted)) for wanted, text in zip(words, said, strict=True)]


TRAINER = TwoRoles()
