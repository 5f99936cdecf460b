"""The fixed samples of a gradient proof: the same for every split, so unlike that no wrong claim hides. No torch.

Equal lengths hide what a loss's normalisation does, so lengths alternate from prompt to prompt and within a prompt's
completions, be they only two of two. Every prompt's rewards have a spread of their own; those of one in four are all
equal. A quarter of the completions is truncated (has no end token), long ones and short ones.
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
    """One completion of one prompt, as token ids, and what it scores."""

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
    reward = given.gauss(0.0, spread) if prompt % 4 != 3 else 1.0  # whose mean is exact: no rounding is scaled up
    return Sample(words, tuple(tokens), reward)


def _length(prompt: int, generation: int, longest: int, given: Random) -> int:
    """Long and short ones in turn in every other prompt, whose long ones differ; short ones in the prompts between.

    Of two tokens where they can be: where all of a group are the end token alone, its advantages cancel.
    """
    if prompt % 2 or (prompt % 4 and longest < 4):
        return 1 if longest < 5 else 2 if prompt % 4 == 1 else given.randint(1, 2)
    most = longest // (1 + prompt % 4 // 2)
    if generation % 2:
        return given.randint(1, max(1, most // 4))
    return most if generation == 0 else given.randint(most - most // 4, most)


def name_of(prompt: int) -> str:
    """The text that stands for prompt number `prompt` in the dataset."""
    return f"prompt {prompt}"


def number_of(name: str) -> int:
    """The number of the prompt that `name_of` named."""
    return int(name.removeprefix("prompt "))
