"""The fixed samples of a gradient proof: equal for every split, and diverse enough to expose a wrong claim. No torch.

Equal lengths would hide the normalisation of a loss, so lengths alternate between prompts and between the completions
of a prompt, even with only two completions of at most two tokens. Each prompt's rewards have their own spread; every
fourth prompt has equal rewards. A quarter of the completions, long and short ones, is truncated (no end token).
"""

from dataclasses import dataclass
from random import Random

PAD, END, UNKNOWN, FIRST_WORD = 0, 1, 2, 3
VOCABULARY = 256
LONGEST = 16  # tokens of the longest completion, unless the recipe allows fewer

# Settings for every recipe: no GPU features, no randomness, and the gradient is neither clipped nor scaled.
# None removes the key; a key that a trainer does not have is skipped.
SAME: dict[str, object] = {
    "use_cpu": True, "bf16": False, "fp16": False, "tf32": None, "dtype": "float32", "load_in_4bit": False,
    "load_in_8bit": False, "torch_compile": False, "torch_compile_backend": None, "torch_compile_mode": None,
    "deepspeed": None, "fsdp": None, "fsdp_config": None,
    "use_liger_kernel": False, "lora_dropout": 0.0, "neftune_noise_alpha": None, "max_grad_norm": 0.0,
    "optim": "sgd", "optim_args": None, "learning_rate": 1e-3, "weight_decay": 0.0, "lr_scheduler_type": "constant",
    "lr_scheduler_kwargs": None, "warmup_steps": 0, "report_to": "none", "push_to_hub": False, "eval_strategy": "no",
    "do_eval": False, "save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no", "run_name": None,
    "dataloader_num_workers": 0, "dataloader_prefetch_factor": None, "dataloader_persistent_workers": False,
    "resume_from_checkpoint": None, "load_best_model_at_end": False, "env": None, "chat_template_kwargs": None,
    "model_init_kwargs": None, "model_revision": "main", "dataset_num_proc": None, "auto_find_batch_size": False,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion of one prompt, as token ids, and its reward."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    reward: float


def sample(prompt: int, generation: int, *, longest: int = LONGEST) -> Sample:
    """Completion number `generation` of prompt number `prompt`, of 1 to `longest` tokens."""
    asked = Random(f"prompt {prompt}")
    words = tuple(asked.randrange(FIRST_WORD, VOCABULARY) for _ in range(2 + prompt % 5))
    spread = asked.uniform(0.3, 2.0)
    given = Random(f"completion {prompt} {generation}")
    tokens = [given.randrange(FIRST_WORD, VOCABULARY) for _ in range(_length(prompt, generation, longest, given))]
    if (prompt // 2 + generation) % 4 != 2 and longest > 1:
        tokens[-1] = END
    reward = given.gauss(0.0, spread) if prompt % 4 != 3 else 1.0  # 1.0: an exact mean, so no rounding is scaled up
    return Sample(words, tuple(tokens), reward)


def _length(prompt: int, generation: int, longest: int, given: Random) -> int:
    """Tokens of a completion. Even prompts alternate between long and short ones, odd prompts have short ones only.

    The long ones of an even prompt differ in length. Half of the odd prompts have two tokens if possible: if all
    completions of a group are only the end token, the group's advantages cancel.
    """
    if prompt % 2 or (prompt % 4 and longest < 4):
        return 1 if longest < 5 else 2 if prompt % 4 == 1 else given.randint(1, 2)
    most = longest // (1 + prompt % 4 // 2)
    if generation % 2:
        return given.randint(1, max(1, most // 4))
    return most if generation == 0 else given.randint(most - most // 4, most)


def name_of(prompt: int) -> str:
    """The text in the dataset for prompt number `prompt`."""
    return f"prompt {prompt}"


def number_of(name: str) -> int:
    """The number of the prompt with the text `name`; the inverse of `name_of`."""
    return int(name.removeprefix("prompt "))
