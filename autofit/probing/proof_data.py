"""The fixed samples of a gradient proof: the same for every split, of different lengths, with varied rewards. No torch.

Equal lengths hide what a loss's normalisation does, so some prompts get short completions and others long ones, and
every prompt has rewards of a spread of its own. A quarter of the completions is truncated (has no end token).
"""

from dataclasses import dataclass
from random import Random

PAD, END, UNKNOWN, FIRST_WORD = 0, 1, 2, 3
VOCABULARY = 256
LONGEST = 16  # tokens of the longest completion, unless the recipe allows fewer

# The same for every recipe: what needs a GPU is off, what is random is off, the gradient is neither clipped nor scaled.
# None leaves the key out; a key that a trainer does not have is skipped.
SAME: dict[str, object] = {
    "use_cpu": True, "bf16": False, "fp16": False, "tf32": None, "dtype": "float32", "load_in_4bit": False,
    "load_in_8bit": False, "torch_compile": False, "deepspeed": None, "fsdp": None, "fsdp_config": None,
    "use_liger_kernel": False, "lora_dropout": 0.0, "neftune_noise_alpha": None, "max_grad_norm": 0.0,
    "optim": "sgd", "optim_args": None, "learning_rate": 1e-3, "weight_decay": 0.0, "lr_scheduler_type": "constant",
    "lr_scheduler_kwargs": None, "warmup_steps": 0, "report_to": "none", "push_to_hub": False, "eval_strategy": "no",
    "do_eval": False, "save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no", "run_name": None,
    "dataloader_num_workers": 0, "dataloader_prefetch_factor": None, "dataloader_persistent_workers": False,
    "resume_from_checkpoint": None, "load_best_model_at_end": False, "env": None, "chat_template_kwargs": None,
    "model_init_kwargs": None, "model_revision": "main",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion of one prompt, as token ids, and what it scores."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    reward: float


def sample(prompt: int, generation: int, *, longest: int = LONGEST) -> Sample:
    """Completion number `generation` of prompt number `prompt`, of 1 to `longest` tokens."""
    asked = Random(f"prompt {prompt}")
    words = tuple(asked.randrange(FIRST_WORD, VOCABULARY) for _ in range(2 + prompt % 5))
    # Two tokens and more: where all of a group are the end token alone, its advantages cancel and leave rounding.
    most = min(longest, max(2, longest // asked.choice((1, 1, 4, 8))))
    spread = asked.uniform(0.3, 2.0)
    given = Random(f"completion {prompt} {generation}")
    length = given.randint(1, most)
    tokens = [given.randrange(FIRST_WORD, VOCABULARY) for _ in range(length)]
    if given.random() < 0.75 and longest > 1:
        tokens[-1] = END
    return Sample(words, tuple(tokens), given.gauss(0.0, spread))


def name_of(prompt: int) -> str:
    """The text that stands for prompt number `prompt` in the dataset."""
    return f"prompt {prompt}"


def number_of(name: str) -> int:
    """The number of the prompt that `name_of` named."""
    return int(name.removeprefix("prompt "))
