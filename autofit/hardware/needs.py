"""What a recipe asks of a card besides memory: the compute capability without which a setting is refused or emulated.

Sources: bfloat16 and tf32 begin with capability 8.0 (torch.cuda.is_bf16_supported without emulation; transformers
refuses `tf32: true` below it), flash-attention 2 with 8.0 and 3 with 9.0 (Dao-AILab/flash-attention's README), fp8
matrix products with 8.9 (torch._scaled_mm), bitsandbytes' int8 products with 7.5 (its installation guide).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autofit.fakegpu.specs import GpuSpec

BFLOAT16_CAPABILITY = (8, 0)  # of cards that compute in bfloat16
_BFLOAT16 = ("bfloat16", "torch.bfloat16", "bf16")
_FLAGS = {
    "bf16": BFLOAT16_CAPABILITY, "bf16_full_eval": BFLOAT16_CAPABILITY, "tf32": (8, 0), "fp8": (8, 9),
    "load_in_8bit": (7, 5),
}  # fmt: skip
_MEANS = {"bf16": "bfloat16", "bf16_full_eval": "bfloat16", "load_in_8bit": "int8 products"}


@dataclass(frozen=True, slots=True)
class CardNeeds:
    """Each feature that a recipe names, the least compute capability that has it, and the setting that names it."""

    features: tuple[tuple[str, tuple[int, int], str], ...] = ()

    def met_by(self, spec: GpuSpec) -> bool:
        return not self.lacking(spec)

    def lacking(self, spec: GpuSpec) -> tuple[str, ...]:
        """The features that `spec` does not have, each with its setting in the recipe."""
        return tuple(f"{name} ({said})" for name, least, said in self.features if spec.compute_capability < least)

    @property
    def words(self) -> str:
        """`bfloat16 and flash attention 2`; "" for a recipe that any card runs."""
        return " and ".join(dict.fromkeys(name for name, _, _ in self.features))


def card_needs(values: Mapping[str, object]) -> CardNeeds:
    """The needs of the recipe `values`, as its YAML states them: what it leaves to defaults asks for nothing."""
    own = values.get("model_init_kwargs")
    return CardNeeds((*_named(values), *(_named(own) if isinstance(own, Mapping) else ())))


def _named(values: Mapping[str, object]) -> Iterator[tuple[str, tuple[int, int], str]]:
    for key, value in values.items():
        said = f"{key}: {str(value).lower() if isinstance(value, bool) else value}"
        if key in ("dtype", "torch_dtype") and str(value) in _BFLOAT16:
            yield "bfloat16", BFLOAT16_CAPABILITY, said
        elif key == "attn_implementation" and isinstance(value, str):
            yield from _attention(value, said)
        elif value is True and key in _FLAGS:
            yield _MEANS.get(key, key), _FLAGS[key], said


def _attention(name: str, said: str) -> Iterator[tuple[str, tuple[int, int], str]]:
    plain = name.replace("-", "_")
    if "flash_attention_3" in plain or "flash_attn3" in plain:
        yield "flash attention 3", (9, 0), said
    elif "flash_attention_2" in plain or "flash_attn" in plain:
        yield "flash attention 2", (8, 0), said
