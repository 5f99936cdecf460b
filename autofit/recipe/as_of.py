"""Differences of older libraries' behaviour with a recipe from today's: `--as-of "trl 0.14"`. Free of torch.

Read in the sources of each version, on 2026-11-25 (tags of huggingface/trl, wheels of TRL 1.10 to 1.16 and of
transformers 4.35 to 4.48):

- Logits of all tokens at the loss until trl 1.14: trl/trainer/{grpo,rloo,dpo}_trainer.py call `selective_log_softmax`
  on `model(...).logits`, and 1.15 calls `add_fused_lm_head` always. SFT's loss was transformers' (loss/loss_utils.py,
  `logits.float()`) until 1.6; since 1.7 `loss_type` is chunked unless it is given (sft_config.py).
- GRPO's per_device_train_batch_size counted prompts in trl 0.14 (grpo_trainer.py, `_prepare_inputs`, which repeats each
  num_generations times), and completions since 0.15 (`RepeatRandomSampler`).
- `gradient_checkpointing` defaults to True since trl 0.22, `bf16` to True since 0.19 (each *_config.py).
- `prepare_model_for_kbit_training` of peft, which makes all weights that are not quantised float32, was called until
  trl 0.25, in DPO until 0.28.
- transformers: `logits.float()` in every forward until 4.45 (models/llama/modeling_llama.py, whose own comment says
  that 4.46 removes it); sdpa is the default attention since 4.36 (modeling_utils.py, `_autoset_attn_implementation`).
- trl 0.22 needs transformers 4.55, 1.0 needs 4.56.2 (setup.cfg, pyproject.toml): with an older one TRL is older too.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autofit.errors import ConfigError, nearest, option, quoted
from autofit.recipe.keys import weight_bits
from autofit.recipe.launch import is_on
from autofit.recipe.profile import Older, Version, profile
from autofit.recipe.recipe import Recipe
from autofit.units import format_bytes

PACKAGES = ("trl", "transformers")
UPGRADE = "pip install -U trl"
PROPOSAL = ', and older ones may hold more: see `autofit estimate --as-of "trl 0.15"`'  # at the end of a recipe's note

_NEEDED = (((4, 55), (0, 21)), ((4, 56, 2), (0, 29)))  # before this transformers TRL is this version or older


@dataclass(frozen=True, slots=True, kw_only=True)
class OlderBehaviour:
    """One thing that older libraries did with a recipe; `held_bytes` more at the loss, where that can be said."""

    text: str
    held_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Then:
    """Differences of older libraries' behaviour with a recipe from today's, the largest first."""

    libraries: str  # as given
    differences: tuple[OlderBehaviour, ...]

    @property
    def held_bytes(self) -> int:
        """Bytes that were held at the loss in addition to today's, as far as they are known."""
        return sum(difference.held_bytes or 0 for difference in self.differences)

    def line(self, *, fits: bool | None = None, fitted: bool | None = None) -> str:
        """The differences in one line. `fits`: the recipe today; `fitted`: it then, None if unknown."""
        if not self.differences:
            return f"with {self.libraries}: no difference from the installed libraries is known for this recipe"
        told = "; ".join(difference.text for difference in self.differences)
        if fits and fitted is False:
            end = f"it did not fit then, and upgrading alone mends it: {UPGRADE}"
        elif fits is False:
            end = f"upgrading mends that, and is not enough here: {UPGRADE}"
        else:
            end = f"upgrading alone mends that: {UPGRADE}"
        return f"with {self.libraries}: {told}; {end}"

    def to_json(self) -> dict[str, object]:
        return {"libraries": self.libraries, "held_bytes": self.held_bytes, "line": self.line()}


def read_libraries(text: str) -> dict[str, Version]:
    """{package: version} of text such as `trl 0.14, transformers 4.48`. Raises ConfigError."""
    found: dict[str, Version] = {}
    for part in re.split(r"[,;]", text):
        match = re.fullmatch(r"\s*([A-Za-z_-]+)\s*(?:==|[ =])\s*v?(\d{1,4}(?:\.\d{1,4}){0,3})\s*", part)
        if match is None:
            raise ConfigError(
                f'{option("as-of")} must look like "trl 0.14" or "trl 0.14, transformers 4.48"; got {quoted(text)}'
            )
        name = match[1].lower()
        if name not in PACKAGES:
            raise ConfigError(
                f"{option('as-of')} knows older versions of {' and '.join(PACKAGES)}; got {quoted(match[1])}"
                f"{nearest(name, PACKAGES)}"
            )
        found[name] = tuple(int(number) for number in match[2].split("."))
    return found


def without_proposal(recipe: Recipe) -> Recipe:
    """`recipe` for a user who named older libraries: its notes omit that proposal."""
    return replace(recipe, notes=tuple(note.removesuffix(PROPOSAL) for note in recipe.notes))


def then_of(recipe: Recipe, text: str) -> Then:
    """Behaviour of the libraries in `text` with `recipe`. Raises ConfigError for text that names none."""
    versions = read_libraries(text)
    trl, transformers = versions.get("trl"), versions.get("transformers")
    if trl is None and transformers is not None:
        trl = next((at_most for before, at_most in _NEEDED if transformers < before), None)
    found = tuple(_differences(recipe, trl or (99,), transformers or (99,)))
    ordered = sorted(found, key=lambda one: -(one.held_bytes or 0))
    return Then(libraries=" ".join(text.split()), differences=tuple(ordered))


def _differences(recipe: Recipe, trl: Version, transformers: Version) -> Iterator[OlderBehaviour]:
    name = recipe.trainer_name or recipe.trainer
    if not profile(name).of_trl:
        return  # trainers that are simulated as their own libraries have them
    upcast = _kbit(recipe, name, trl)
    if logits := _logits(recipe, name, trl, transformers, upcast=upcast is not None):
        yield logits
    if upcast:
        yield upcast
    checkpoints = ("gradient_checkpointing", "activation_checkpointing")
    if trl < (0, 22) and not any(key in recipe.values for key in checkpoints):
        yield OlderBehaviour(
            text="gradient_checkpointing was off unless set (TRL before 0.22), so all activations were held"
        )
    whole = str(recipe.resolved.get("dtype") or "float32") == "float32"
    if whole and is_on(recipe.resolved.get("bf16")) and not _mixed(recipe, trl):
        yield OlderBehaviour(text="bf16 was off unless set (TRL before 0.19), so float32 weights computed in float32")
    if transformers < (4, 36) and recipe.resolved.get("attn_implementation") in (None, "sdpa"):
        yield OlderBehaviour(
            text="attention was eager (transformers before 4.36) and held the scores of every two tokens"
        )


def _logits(recipe: Recipe, name: str, trl: Version, transformers: Version, *, upcast: bool) -> OlderBehaviour | None:
    """The logits that were held whole, with what the loss made of them."""
    older = profile(name).older
    fused = older.logits_until
    if fused is None or trl >= fused or is_on(recipe.resolved.get("use_liger_kernel")):
        return None
    if "chunked" in str(recipe.values.get("loss_type")):
        return None
    rows, tokens, vocabulary = _rows(recipe, older, trl), _tokens(recipe), recipe.vocab_size
    if not rows or not tokens or not vocabulary:
        return OlderBehaviour(text=f"the logits of all tokens were held whole (TRL before {_said(fused)})")
    count = rows * tokens * vocabulary
    held = count * bytes_a_logit(name, trl, float32=upcast or transformers < (4, 46) or _in_float32(recipe, trl))
    counted = " (a prompt's completions together, as per_device_train_batch_size counted prompts)"
    return OlderBehaviour(
        text=f"about {format_bytes(held)} more at the loss, the logits of {rows} x {tokens:,} tokens x {vocabulary:,}, "
             f"held whole with their copies by TRL before {_said(fused)}"
             f"{counted if trl < older.prompts_until else ''}",
        held_bytes=held,
    )  # fmt: skip


def bytes_a_logit(name: str, trl: Version, *, float32: bool) -> int:
    """Peak bytes of a loss and its backward for each logit; counted by running each way (tests/test_as_of.py).

    In float32 two copies and a gradient. A loss that divides by the temperature, or takes the log-softmax of all rows
    at once, has three copies in 16 bits, one that takes a row at a time two. SFT's makes float32 of 16 bits itself.
    """
    older = profile(name).older
    if older.makes_float32:
        return 12
    if float32:
        return 8 if trl < older.two_copies_until else 12
    since = older.three_copies_since
    three = trl < older.three_copies_until if since is None else trl >= since
    return 6 if three else 4


def _mixed(recipe: Recipe, trl: Version) -> bool:
    """True if it trained in mixed precision: `bf16` was off unless set before TRL 0.19."""
    said = recipe.resolved if trl >= (0, 19) else recipe.values
    return any(is_on(said.get(key)) for key in ("bf16", "fp16"))


def _in_float32(recipe: Recipe, trl: Version) -> bool:
    """True if the logits are float32: accelerate makes them so in mixed precision (`convert_outputs_to_fp32`)."""
    return _mixed(recipe, trl) or str(recipe.resolved.get("dtype") or "float32") == "float32"


def _rows(recipe: Recipe, older: Older, trl: Version) -> int:
    rows = older.rows * recipe.micro_batch_size
    return rows * recipe.num_generations if trl < older.prompts_until else rows


def _tokens(recipe: Recipe) -> int | None:
    """Tokens of a row that have logits: of a completion, where the trainer generates (`logits_to_keep`)."""
    if recipe.generates:
        return None if recipe.max_completion_tokens is None else recipe.max_completion_tokens + 1
    limit = recipe.resolved.get("max_length")
    if is_on(recipe.resolved.get("packing")) and isinstance(limit, int):
        return limit
    return recipe.longest_sample_tokens


def _kbit(recipe: Recipe, name: str, trl: Version) -> OlderBehaviour | None:
    before = profile(name).older.kbit_until
    if not weight_bits(recipe.resolved) or not recipe.uses_lora or trl >= before or not recipe.embedding_parameters:
        return None
    if str(recipe.resolved.get("dtype") or "float32") == "float32":
        return None
    held = 2 * recipe.embedding_parameters
    return OlderBehaviour(
        text=f"{format_bytes(held)} more of weights: embeddings and head became float32 (TRL before {_said(before)})",
        held_bytes=held,
    )  # fmt: skip


def _said(version: Version) -> str:
    return ".".join(str(number) for number in version)
