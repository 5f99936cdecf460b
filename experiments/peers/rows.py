"""The measured rows: what was trained, on which card, by whom it was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured training, in words that every estimator can be told."""

    name: str
    set: str
    card: str  # as autofit names it
    card_gib: float  # its size as sold
    ranks: int = 1
    sharding: Literal["none", "fsdp"] = "none"
    kind: Literal["allocated", "reserved"]  # which of torch's peaks was measured
    measured_bytes: int
    measured_step_s: float | None = None
    model: str
    parameters: int
    task: Literal["causal", "encoder"] = "causal"
    method: Literal["full", "lora", "qlora"]
    lora_r: int = 0
    lora_targets: tuple[str, ...] = ()
    lora_dropout: float = 0.0
    adapter: Literal["float32", "bfloat16"] = "float32"
    precision: Literal["bf16", "amp-bf16", "amp-fp16"]  # bf16: weights too; amp: float32 weights under autocast
    micro_batch: int
    tokens: int
    checkpointing: bool = False
    attention: Literal["eager", "sdpa", "flash_attention_2"] = "sdpa"
    keeps_gradients: bool = False  # zero_grad(set_to_none=False): the gradients stay between steps

    accumulation: int = 1  # micro-batches of a step: with 2 the gradients are there in the second's forward pass
    own_program: str = ""  # set:row of experiments/accuracy, where the measured project's own code was simulated
    libraries: str = ""  # a set of experiments/accuracy, with whose versions a program of this row runs, else today's
    cache: bool = False  # a forward pass keeps keys and values, as transformers does where nobody says use_cache=False

    @property
    def is_lora(self) -> bool:
        return self.method != "full"

    @property
    def attention_only(self) -> bool:
        """Whether the adapters are on projections of attention alone."""
        return set(self.lora_targets) <= {"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "query_key_value"}

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Row:
        values = json.loads(text)
        return cls(**{**values, "lora_targets": tuple(values["lora_targets"])})


def read_rows() -> tuple[Row, ...]:
    """All rows of rows.yaml; what a set's rows share stands once, as `all`."""
    from experiments.peers.hub import model

    found = []
    for name, part in yaml.safe_load((HERE / "rows.yaml").read_text(encoding="utf-8")).items():
        shared: Mapping[str, Any] = part["all"]
        for row, values in part["rows"].items():
            told = {**shared, **values}
            known = model(told["model"])
            assert known is not None, told["model"]
            targets = tuple(told.pop("lora_targets", ()))
            found.append(Row(name=row, set=name, parameters=known[1], lora_targets=targets, **told))
    return tuple(found)
