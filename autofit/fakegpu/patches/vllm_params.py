"""What a caller may ask of vLLM's generation: the arguments of the real classes, which refuse every other one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from types import SimpleNamespace

# Fields of vllm.SamplingParams (vllm/sampling_params.py) of 0.22.0, the first version that TRL 1.16 takes, and those
# that came until 0.31.0, the last one. None of the first went.
_FIRST_FIELDS = (
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p",
    "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs",
    "logprob_token_ids", "flat_logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
    "include_stop_str_in_output", "output_kind", "skip_clone", "output_text_buffer_length", "_eos_token_id",
    "_all_stop_token_ids", "structured_outputs", "logit_bias", "allowed_token_ids", "extra_args", "bad_words",
    "_bad_words_token_ids", "skip_reading_prefix_cache", "thinking_token_budget", "repetition_detection",
    "routed_experts_prompt_start",
)  # fmt: skip
_LATER_FIELDS = (
    "watermarking", "prompt_logprob_token_ids", "prompt_logprob_start", "stream_interval", "trace_decode_token_ids",
)  # fmt: skip
FIELDS = frozenset((*_FIRST_FIELDS, *_LATER_FIELDS))


class SamplingParams(SimpleNamespace):
    """vllm.SamplingParams: stores its arguments, and refuses what is no field of it as the real one (msgspec) does."""

    def __init__(self, **given: object) -> None:
        unknown = next((name for name in given if name not in FIELDS), None)
        if unknown is not None:
            raise TypeError(f"Unexpected keyword argument '{unknown}' (vLLM's SamplingParams has no such field)")
        super().__init__(**given)


@dataclass
class StructuredOutputsParams:
    """vllm.sampling_params.StructuredOutputsParams: exactly one constraint."""

    json: object = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        kinds = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        given = [name for name in kinds if asdict(self)[name] is not None]
        if len(given) != 1:
            raise ValueError(f"structured outputs need one of {', '.join(kinds)}; got {', '.join(given) or 'none'}")
