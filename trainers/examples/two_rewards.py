"""A training loop of one's own as a trainer: DPO with a policy, a reference and two reward models, in plain torch.

The pairs of a dataset are scored by a helpfulness and a harmlessness model; the policy is trained to prefer the chosen
answer by a margin that grows with the difference of the scores. In a folder with this file, two_rewards.yaml and a
run.yaml with the keys of `Settings`:

    autofit search run.yaml --trainer two_rewards:TRAINER --target-vram 64GB
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import logsigmoid
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from autofit.errors import ConfigError
from autofit.plugin import BatchKeys, Report
from autofit.plugin.loop import Loop, LoopTrainer, Setup
from autofit.plugin.models import load_model


@dataclass(frozen=True)
class Settings:
    """The keys of a recipe."""

    policy: str
    reward_models: list[str]  # two: helpful, harmless
    pairs: str  # a .jsonl file with prompt, chosen and rejected in each line
    reference: str | None = None  # default: the policy as it is before training
    batch_size: int = 2
    accumulation: int = 4
    max_length: int = 512
    beta: float = 0.1
    margin: float = 1.0
    learning_rate: float = 5e-7
    dtype: str = "bfloat16"
    gradient_checkpointing: bool = False
    max_steps: int = 100
    seed: int = 0


@dataclass(frozen=True)
class Batch:
    """One micro-batch of P pairs, the chosen answers before the rejected ones, and what the frozen models say of it."""

    ids: torch.Tensor  # (2P, T)
    answer: torch.Tensor  # (2P, T), 1 where a token belongs to an answer
    margin: torch.Tensor  # (P,)
    reference: torch.Tensor  # (2P,) log-probabilities


class TwoRewardsLoop(Loop):
    model: Any

    def __init__(self, settings: Settings, setup: Setup) -> None:
        self.settings, self.setup = settings, setup
        dtype = torch.float32 if setup.proof else getattr(torch, settings.dtype)
        torch.manual_seed(settings.seed)
        if setup.proof:
            self.model, self.reference, *self.rewards = _small_models(settings)
        else:
            self.model = load_model(settings.policy, AutoModelForCausalLM, setup, dtype=dtype)
            name = settings.reference or settings.policy
            self.reference = load_model(name, AutoModelForCausalLM, setup, dtype=dtype)
            self.rewards = [
                load_model(name, AutoModelForSequenceClassification, setup, dtype=dtype, num_labels=1, pad_token_id=0)
                for name in settings.reward_models
            ]
        for frozen in (self.reference, *self.rewards):
            frozen.requires_grad_(False).eval()
        if settings.gradient_checkpointing:
            new_name = "activation_checkpointing_enable"  # since transformers 5.23
            getattr(self.model, new_name, self.model.gradient_checkpointing_enable)()
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.learning_rate)
        self.pairs = [] if setup.random_weights else _read(settings)

    def micro_batches(self, step: int, report: Report) -> Sequence[Batch]:
        size, count = self.settings.batch_size, self.settings.accumulation
        first = step * size * count
        batches = []
        for start in range(first, first + size * count, size):
            ids, answer = self._tokens(range(start, start + size))
            with report.phase("scoring"), torch.no_grad():
                helpful, harmless = (_scores(model, ids) for model in self.rewards)
                score = helpful + harmless
                margin = self.settings.margin * (score[:size] - score[size:])
                batches.append(Batch(ids, answer, margin, _log_probs(self.reference, ids, answer)))
        return batches

    def loss(self, micro_batch: Batch) -> torch.Tensor:
        size = len(micro_batch.margin)
        ratio = _log_probs(self.model, micro_batch.ids, micro_batch.answer) - micro_batch.reference
        preference = self.settings.beta * (ratio[:size] - ratio[size:])
        pairs_of_the_step = self.settings.batch_size * self.settings.accumulation
        return -logsigmoid(preference - micro_batch.margin).sum() / pairs_of_the_step

    def _tokens(self, numbers: range) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and answer masks (2P, T) of the pairs `numbers`, which begin anew at the end of the data."""
        device = self.setup.device
        if self.setup.sample is not None:  # a probe: every sequence as long as the longest one
            tokens = min(int(self.setup.sample["tokens"]), self.settings.max_length)
            ids = torch.ones(2 * len(numbers), tokens, dtype=torch.long, device=device)
            return ids, torch.ones_like(ids)
        if self.setup.proof:
            rows = [_made_up(number, side) for side in range(2) for number in numbers]
        else:
            chosen = [self.pairs[number % len(self.pairs)] for number in numbers]
            rows = [pair[side] for side in ("chosen", "rejected") for pair in chosen]
        rows = [(ids[: self.settings.max_length], prompt) for ids, prompt in rows]
        longest = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in rows], device=device)
        answer = torch.tensor(
            [[0] * prompt + [1] * (len(ids) - prompt) + [0] * (longest - len(ids)) for ids, prompt in rows],
            device=device,
        )
        return ids, answer


class TwoRewards(LoopTrainer):
    name = "two_rewards"
    settings = Settings
    space = Path(__file__).with_suffix(".yaml")
    keys = BatchKeys(micro_batch="batch_size", accumulation="accumulation", length="max_length")

    @property
    def compared(self) -> tuple[str, ...]:
        return ("batch_size", "accumulation", "gradient_checkpointing")

    def model_name(self, settings: Settings) -> str:
        return settings.policy

    def loop(self, settings: Settings, setup: Setup) -> TwoRewardsLoop:
        if len(settings.reward_models) != 2:
            raise ConfigError(f"reward_models must name two models; got {settings.reward_models!r}")
        return TwoRewardsLoop(settings, setup)

    def longest_sample(self, settings: Settings) -> dict[str, Any]:
        longest = max(len(pair[side][0]) for pair in _read(settings) for side in ("chosen", "rejected"))
        return {"tokens": min(longest, settings.max_length)}


def _read(settings: Settings) -> list[dict[str, tuple[list[int], int]]]:
    """The pairs as tokens: {side: (ids of prompt and answer, tokens of the prompt)}."""
    path = Path(settings.pairs)
    if not path.is_file():
        raise ConfigError(f"pairs must be a .jsonl file with prompt, chosen and rejected; got {settings.pairs!r}")
    tokenizer = AutoTokenizer.from_pretrained(settings.policy)
    pairs = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        prompt = tokenizer(row["prompt"])["input_ids"]
        pairs.append({s: (prompt + tokenizer(row[s])["input_ids"], len(prompt)) for s in ("chosen", "rejected")})
    return pairs


def _log_probs(model: Any, ids: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
    """Log-probability (2P,) of each answer."""
    logits = model(input_ids=ids).logits[:, :-1].float()
    each = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    found: torch.Tensor = (each * answer[:, 1:]).sum(-1)
    return found


def _scores(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Score (2P,) of each answer."""
    found: torch.Tensor = model(input_ids=ids).logits[:, 0].float()
    return found


def _small_models(settings: Settings) -> list[Any]:
    """The models of a gradient proof: how the loss divides does not depend on their architecture."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, num_labels=1, initializer_range=0.2,
    )  # fmt: skip
    scoring = [LlamaForSequenceClassification(config) for _ in settings.reward_models]
    return [LlamaForCausalLM(config), LlamaForCausalLM(config), *scoring]


def _made_up(number: int, side: int) -> tuple[list[int], int]:
    """Ids of pair `number`'s answer on one side, and the tokens of its prompt: lengths differ from pair to pair."""
    generator = torch.Generator().manual_seed(2 * number + side)
    length = 4 + (3 * number + 5 * side) % 9
    return torch.randint(1, 64, (length,), generator=generator).tolist(), 2


TRAINER = TwoRewards()
