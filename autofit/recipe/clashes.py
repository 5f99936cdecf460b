"""Settings that a training fails with once they come together, though each works by itself. No torch here."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from autofit.recipe.catalogue import text_config
from autofit.recipe.launch import LAUNCH, Launch
from autofit.recipe.profile import profile
from autofit.recipe.recipe import Recipe

SHARDING, OFFLOAD = "launch.sharding", "launch.offload"
_RMSPROP = ("rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit")
_OF_BITSANDBYTES = (
    "adamw_8bit", "adamw_bnb_8bit", "ademamix", "ademamix_8bit", "lion_8bit", "lion_32bit", "paged_adamw_32bit",
    "paged_adamw_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit", "paged_lion_32bit", "paged_lion_8bit",
    *_RMSPROP,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Clash:
    """Keys of a recipe, each with the values that clash: a training with all of them fails. Then what happens.

    `when` says for which recipes.
    """

    settings: Mapping[str, tuple[object, ...]]
    key: str  # that its user would change
    what: str
    fix: str
    when: Callable[[Recipe], bool] = lambda recipe: True

    def is_met(self, value: Callable[[str], object]) -> bool:
        """Whether a recipe with `value(key)` for each key has all of the settings."""
        return all(value(key) in values for key, values in self.settings.items())


def _has_own_lm_head(recipe: Recipe) -> bool:
    """Whether TRL's loss takes the LM head of the model, and that is known not to be the input embeddings."""
    by_head = profile(recipe.trainer_name or recipe.trainer).takes_lm_head
    return by_head and text_config(recipe.model).get("tie_word_embeddings") is False


def _is_trls(recipe: Recipe) -> bool:
    return profile(recipe.trainer_name or recipe.trainer).of_trl


CLASHES = (
    Clash(  # transformers: generation/utils.py, line 784; continuous_batching/continuous_api.py, line 1211
        settings={SHARDING: ("fsdp2",), OFFLOAD: ("parameters",), "use_vllm": (False,)},
        key=OFFLOAD,
        what="transformers 5.23 moves the inputs of a generation to the host, where the weights are, and the gathered "
             "weights are on the card: it ends with `Expected all tensors to be on the same device`",
        fix="set fsdp_offload_params: false, or generate with vLLM (use_vllm: true)",
    ),
    Clash(  # accelerate/utils/fsdp_utils.py, line 733, sees no norm in a PeftModel; trl/trainer/utils.py, line 1615
        settings={SHARDING: ("fsdp2",), OFFLOAD: ("parameters",), "use_peft": (True,)},
        key=OFFLOAD,
        what="under PEFT accelerate 1.15 makes the LM head a group of its own, which TRL's loss does not gather: it "
             "moves the hidden states to the host, where the head's shard is, and ends with tensors on two devices",
        fix="set fsdp_offload_params: false, or train all weights",
        when=_has_own_lm_head,
    ),
    Clash(  # seen with bitsandbytes 0.50 and torch 2.13; github.com/bitsandbytes-foundation/bitsandbytes/issues/1633
        settings={SHARDING: ("fsdp2",), "optim": _OF_BITSANDBYTES},
        key="optim",
        what="optimizers of bitsandbytes cannot update the shards of FSDP2 (DTensors): it ends with `does not have a "
             "sharding strategy registered` in the first optimizer step",
        fix="set optim: adamw_torch_fused, or adamw_torch_8bit (torchao); or take multi_gpu",
    ),
    Clash(  # bitsandbytes 0.50: backends/cuda/ops.py, str2optimizer32bit; seen with the CUDA build of torch 2.13
        settings={"optim": _RMSPROP, "dtype": ("bfloat16",), "use_peft": (False,)},
        key="optim",
        what="bitsandbytes' RMSprop has no kernel for bfloat16 gradients: it ends with `data type combination not "
             "supported` in the first optimizer step",
        fix="set optim: adamw_bnb_8bit, or dtype: float32",
    ),
    *(
        Clash(  # trl/trainer/sft_trainer.py, line 911, and its like; seen with the CUDA build of torch 2.13
            settings={"fp16": (True,), "use_peft": (True,), low_bits: (True,)},
            key="fp16",
            what="TRL makes the adapters of a quantised model bfloat16, and the loss scaling of fp16 has no kernel for "
                 "their gradients: it ends with `not implemented for 'BFloat16'` in the first optimizer step",
            fix="set fp16: false and bf16: true",
            when=_is_trls,
        )
        for low_bits in ("load_in_4bit", "load_in_8bit")
    ),
)  # fmt: skip


def clashes(recipe: Recipe, values: Mapping[str, object] | None = None) -> Iterator[Clash]:
    """What fails in `recipe`, or where its YAML has `values`, in them."""
    changed = recipe.values if values is None else values
    launch = (recipe.launch if values is None else Launch.of(values)).to_values()

    def value(key: str) -> object:
        outer, _, inner = key.partition(".")
        return launch.get(inner) if outer == LAUNCH else changed.get(key, recipe.resolved.get(key))

    return (clash for clash in CLASHES if clash.is_met(value) and clash.when(recipe))  # which may read a file


def clashes_of(recipe: Recipe) -> Iterator[Clash]:
    """The clashes that the recipe's trainer and model can have."""
    return (clash for clash in CLASHES if clash.when(recipe))
