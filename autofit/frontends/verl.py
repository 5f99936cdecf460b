"""The values of a verl config, and its batch by verl's own arithmetic.

Read in verl at commit 1dda039b (0.9, trainer v1, which is its default). No torch here.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise

from autofit.errors import ConfigError
from autofit.frontends.command import ASKS_FOR_NPUS, Command, commands
from autofit.frontends.command import UNSURE as OPEN
from autofit.recipe.yaml_file import parse_yaml

ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
_FSDP = f"{ACTOR}.fsdp_config"
FSDP_STRATEGIES = ("fsdp", "fsdp2")
MODEL_PATH = "model.path"  # ends the keys of the actor's model and the critic's
UNSURE = "?"  # a value that is not said for certain, in whose place no default may stand
_MATTERS_LITTLE = (  # where these are not certain, a rule may stay unsaid, and nothing else changes
    "log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu", "data.max_prompt_length",
    "data.max_response_length", "rollout.tensor_model_parallel_size", "rollout.data_parallel_size",
    "rollout.pipeline_model_parallel_size",
)  # fmt: skip
ENGINE, CONFIG_NAME = "model_engine", "config-name"  # an override, and an option of hydra, that choose the defaults
_ENGINE, _CONFIG_NAME = "dp", "ppo_trainer"
# verl/trainer/config/_generated_ppo_trainer.yaml: what hydra fills in. None: not set.
DEFAULTS: Mapping[str, object] = {
    "data.train_batch_size": 1024, "data.gen_batch_size": None, "data.max_prompt_length": 512,
    "data.max_response_length": 512, f"{ACTOR}.strategy": "fsdp", f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.ppo_micro_batch_size": None, f"{ACTOR}.ppo_micro_batch_size_per_gpu": None,
    f"{ACTOR}.use_dynamic_bsz": False, f"{ACTOR}.ppo_max_token_len_per_gpu": 16384, f"{ACTOR}.ppo_epochs": 1,
    f"{ACTOR}.use_kl_loss": False, f"{ACTOR}.kl_loss_coef": 0.001, f"{ACTOR}.ulysses_sequence_parallel_size": 1,
    f"{_FSDP}.ulysses_sequence_parallel_size": 1, "actor_rollout_ref.model.use_remove_padding": True,
    "actor_rollout_ref.model.lora_rank": 0, f"{ROLLOUT}.n": 1, f"{ROLLOUT}.tensor_model_parallel_size": 2,
    f"{ROLLOUT}.data_parallel_size": 1, f"{ROLLOUT}.pipeline_model_parallel_size": 1,
    f"{ROLLOUT}.log_prob_micro_batch_size": None, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": None,
    f"{REF}.log_prob_micro_batch_size": None, f"{REF}.log_prob_micro_batch_size_per_gpu": None,
    "algorithm.adv_estimator": "gae", "algorithm.use_kl_in_reward": False, "critic.enable": None,
    "trainer.nnodes": 1, "trainer.n_gpus_per_node": 8, "trainer.use_v1": True,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class VerlConfig:
    """A config's values by dotted path, without hydra's defaults."""

    said: Mapping[str, object]

    @classmethod
    def of(cls, values: Mapping[str, object]) -> "VerlConfig":
        """Of a nested or a dotted mapping. A reference such as ${...} is not certain, and no default stands for it."""
        leaves = {path: UNSURE if "${" in str(value) else value for path, value in _leaves(values)}
        return cls({path: value for path, value in leaves.items() if value != UNSURE or path in DEFAULTS})

    @property
    def unsure(self) -> tuple[str, ...]:
        """The keys of the batch and of the models whose value is not certain."""
        return tuple(
            path for path, value in self.said.items() if value == UNSURE and not path.endswith(_MATTERS_LITTLE)
        )

    def value(self, path: str) -> object:
        return self.said.get(path, DEFAULTS.get(path))

    def whole(self, path: str) -> int | None:
        """A whole number; None where the value is none."""
        found = self.value(path)
        return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None

    def is_on(self, path: str) -> bool:
        return str(self.value(path)).lower() in ("true", "1")

    @property
    def strategy(self) -> str:
        """What shards the actor: the said strategy, else that of the engine or the config whose defaults are taken."""
        said, engine = self.said.get(f"{ACTOR}.strategy"), str(self.said.get(ENGINE, _ENGINE))
        name = str(self.said.get(CONFIG_NAME, _CONFIG_NAME)).removesuffix(".yaml")
        if engine == _ENGINE and name != _CONFIG_NAME:
            return f"the config {name}"
        return str(said or (DEFAULTS[f"{ACTOR}.strategy"] if engine == _ENGINE else engine))

    def told(self, path: str) -> str:
        """`rollout.n 5`, or `rollout.n 1 (verl's default)`."""
        short = path.removeprefix("actor_rollout_ref.")
        return f"{short} {self.value(path)}" + ("" if path in self.said else " (verl's default)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The batch of a config under FSDP. `micro` is None with dynamic micro-batches, or where it is not set."""

    prompts: int  # of a generation
    mini_prompts: int  # of an optimizer step
    group: int
    gpus: int
    shards: int  # data-parallel size: GPUs by sequence-parallel size
    micro: int | None
    epochs: int
    multiple: int = 1  # of samples, to which verl pads a generation before it trains

    @property
    def generation(self) -> int:
        return self.prompts * self.group

    @property
    def padded(self) -> int:
        """Samples of a generation with those of two tokens that the trainer v1 adds, which have no loss.

        v1/trainer_base.py, _balance_batch; the older trainer adds none.
        """
        return -(-self.generation // self.multiple) * self.multiple

    @property
    def steps(self) -> int:
        """Optimizer steps of the actor in a generation."""
        return self.padded // self.effective * self.epochs

    @property
    def effective(self) -> int:
        """Samples of an optimizer step, over all GPUs (ray_trainer.py, line 1352; v1/trainer_base.py, line 1724)."""
        return self.mini_prompts * self.group

    @property
    def each(self) -> int:
        """Samples of an optimizer step on each data-parallel rank (engine_workers.py, line 269)."""
        return self.effective // self.shards


def typos(config: VerlConfig) -> Iterator[str]:
    """Keys that are one of the batch's but for a letter or two: the default would stand in place of what was meant."""
    for path in config.said:
        section, _, name = path.rpartition(".")
        near = [known for known in DEFAULTS if known.rpartition(".")[0] == section and path not in DEFAULTS]
        names = {known.rpartition(".")[2]: known for known in near if abs(len(known) - len(path)) <= 2}
        if close := get_close_matches(name, names, n=1, cutoff=0.9):
            yield f"verl has no key {path}; write {names[close[0]]}"


def on_gpus(values: Mapping[str, object], gpus: int | None) -> Mapping[str, object]:
    """The `values` of a config on so many GPUs of one machine, where they are told beside it."""
    paths = {path: value for path, value in VerlConfig.of(values).said.items() if not path.startswith("trainer.n")}
    return values if gpus is None else {**paths, "trainer.nnodes": 1, "trainer.n_gpus_per_node": gpus}


BATCH_KEYS = ("data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size", f"{ROLLOUT}.n", "trainer.nnodes",
              "trainer.n_gpus_per_node", f"{ACTOR}.ppo_epochs")  # fmt: skip


def batch_of(config: VerlConfig) -> Batch | None:
    """The batch; None where a number of it is not whole, or the strategy is not FSDP."""
    found = [config.whole(name) for name in BATCH_KEYS]
    if None in found or config.strategy not in FSDP_STRATEGIES:
        return None
    prompts, mini, group, nodes, each, epochs = (number or 1 for number in found)
    dynamic = config.is_on(f"{ACTOR}.use_dynamic_bsz")
    shards = max(1, nodes * each // sequence_parallel(config))
    minis = [mini, config.whole("critic.ppo_mini_batch_size") or mini] if has_critic(config) else [mini]
    multiple = math.lcm(shards, *(group * size for size in minis)) if config.is_on("trainer.use_v1") else 1
    return Batch(
        prompts=prompts, mini_prompts=mini, group=group, gpus=nodes * each, shards=shards,
        micro=None if dynamic else config.whole(f"{ACTOR}.ppo_micro_batch_size_per_gpu"), epochs=epochs,
        multiple=multiple,
    )  # fmt: skip


def has_critic(config: VerlConfig) -> bool:
    """trainer/ppo/utils.py, need_critic."""
    if config.value("critic.enable") is not None:
        return config.is_on("critic.enable")
    return config.value("algorithm.adv_estimator") == "gae"


def effective_sentence(values: Mapping[str, object]) -> str:
    """The effective batch in a sentence, from what the file says and verl's defaults."""
    config = VerlConfig.of(values)
    mini, group = config.whole(f"{ACTOR}.ppo_mini_batch_size"), config.whole(f"{ROLLOUT}.n")
    if mini is None or group is None:
        return "its optimizer steps are of ppo_mini_batch_size x rollout.n samples over all GPUs"
    return (
        f"its optimizer steps are of {mini * group:,} samples over all GPUs (ppo_mini_batch_size {mini} x rollout.n "
        f"{group})"
    )


def sequence_parallel(config: VerlConfig, section: str = ACTOR) -> int:
    """Ulysses' sequence-parallel size of the actor, or of the reference where `section` is its path.

    The model's own key wins where it is above 1 (workers/config/actor.py); the reference has the actor's own, but not
    that of the actor's fsdp_config (trainer/config/ref/dp_ref.yaml).
    """
    key = "ulysses_sequence_parallel_size"
    own = config.whole(f"{section}.{key}") or config.whole(f"{ACTOR}.{key}") or 1
    return own if own > 1 else config.whole(f"{section}.fsdp_config.{key}") or 1


def _leaves(values: Mapping[str, object], path: str = "") -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


# The overrides of a shell script that starts verl: `data.train_batch_size=${BATCH:-1024}`. Nothing is run.
#
# What the script sets outside of conditions and loops is certain. A value that hangs on a condition, on the environment
# or on a command is not, and its key is named instead.

_ENTRY = "verl.trainer.main_ppo"
_ACTOR = "actor_rollout_ref."  # of the keys of every training with verl's workers
_NO_TRAINING = re.compile(r"generat|(?:^|[._])(?:eval|serve|merge)")  # in the name of what is started
_OVERRIDE = re.compile(r"(?:\+{0,2}(model_engine|[a-z_]+(?:\.[a-z0-9_]+)+)|--(config-name))=(.*)", re.DOTALL)


# What is taken for granted where a script has other values for Ascend's cards.
NVIDIA = "the script asks for torch_npu; its values for NVIDIA's cards were read, not those for Ascend's NPUs"


def asks_for_npus(text: str) -> bool:
    return ASKS_FOR_NPUS.search(text) is not None


def starts_verl(text: str) -> bool:
    return (_ENTRY in text or _ACTOR in text) and next(_trainings(text), None) is not None


def entry(text: str) -> str | None:
    """The module or file that a script trains with in place of verl's own, as projects built on verl have one."""
    found = next((_program(command) for command in _trainings(text)), None)
    return None if found == _ENTRY else found


def overrides(text: str) -> tuple[dict[str, object], tuple[str, ...]]:
    """({dotted key: value} of the overrides that are certain, the keys of those that are not)."""
    found: dict[str, object] = {}
    unread: dict[str, None] = {}
    for command in _trainings(text):
        said = _overrides(command)
        for key, value in said.items():
            if value == UNSURE or command.conditional or found.get(key, value) != value:
                unread[key] = None
            else:
                found[key] = value
    return {key: value for key, value in found.items() if key not in unread}, tuple(unread)


def bare_keys(text: str) -> tuple[str, ...]:
    """The keys of the overrides of a script that hydra must find in verl's config: without a `+` or `++`."""
    words = [word for command in _trainings(text) for word in command.words if not word.startswith(("+", "-"))]
    found = [match[1] for word in words if (match := _OVERRIDE.fullmatch(word))]
    return tuple(dict.fromkeys(key for key in found if "." in key))


def likely_overrides(text: str) -> dict[str, object]:
    """The values of overrides that are not certain, as they would be if conditions that set a variable held.

    The first value stands where several conditions set one, None where it comes from a command. Of a model in a folder
    that the environment names, the last part of the path stands. A training that itself hangs on a condition is left
    out, unless all do: then the first is taken.
    """
    perhaps: dict[str, object] = {}
    trainings = list(_trainings(text, likely=True))
    for command in [each for each in trainings if not each.conditional] or trainings[:1]:
        for key, value in _overrides(command, folders=True).items():
            perhaps.setdefault(key, None if value == UNSURE else value)
    return {key: perhaps[key] for key in overrides(text)[1] if key in perhaps}


def span(text: str) -> tuple[int, int]:
    """(start, end) of the text of the first training that a script starts. Raises ConfigError where it starts none."""
    for command in _trainings(text):
        return command.start, command.end
    raise ConfigError(f"no `python -m {_ENTRY}` is started in it, so it does not train")


def _trainings(text: str, *, likely: bool = False) -> Iterator[Command]:
    """The commands of a script that start verl, or a project's own trainer with verl's keys."""
    return (command for command in commands(text, likely=likely) if _program(command) is not None)


def _program(command: Command) -> str | None:
    """The module or file with which a command trains by verl's keys; None where it is no such training."""
    words = command.words
    if _ENTRY in words:
        return _ENTRY
    if not any(word.lstrip("+").startswith(_ACTOR) for word in words):
        return None
    files = (word for before, word in pairwise(words) if before == "-m" or word.endswith(".py"))
    return next((word for word in files if OPEN not in word and not _NO_TRAINING.search(word)), None)


def _overrides(command: Command, *, folders: bool = False) -> dict[str, object]:
    """{key: value} of a command, the last one where a key is given twice; UNSURE for what is not certain.

    With `folders` a model's path is at least the name of its folder.
    """
    said: dict[str, object] = {}
    words = iter(command.words)
    for word in words:
        word = f"{word}={next(words, '')}" if word == "--config-name" else word
        word = re.sub(r"^\+{0,2}\w+@actor_rollout_ref\.actor=", f"{ENGINE}=", word)  # the whole group is another one
        if found := _OVERRIDE.fullmatch(word):
            key, value = found[1] or found[2], found[3]
            if folders and key.endswith(MODEL_PATH):
                value = value.rpartition("/")[2] if OPEN in value else value
            said[key] = UNSURE if OPEN in value else _parsed(value)
    return said


def _parsed(value: str) -> object:
    """The value as YAML has it; hydra's null is None here as well."""
    try:
        return parse_yaml(value)
    except ConfigError:
        return value
