"""The recipe of a plain `transformers.Trainer`, in the form of TRL's scripts: its config and its parser.

TRL never makes the logits of a whole micro-batch; what trains with transformers' own loss does, and so needs gigabytes
more. LLaMA-Factory, Axolotl, ms-swift and most scripts of one's own are such trainings.
"""

from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser

TOKENS = ("sft", "asft", "gkd", "diffusion", "ebft")  # losses over the tokens of samples
SAMPLES = (*TOKENS, "classify", "label_tokens")  # of which a row is one sample; those of the others are two answers
WITH_REFERENCE = ("asft", "dpo", "kto")
OBJECTIVES = ("sft", *WITH_REFERENCE, "orpo", "simpo", "cpo", "classify", "label_tokens", "reward", "gkd", "embed",
              "rerank", "diffusion", "ebft")  # fmt: skip


@dataclass
class HfConfig(TrainingArguments):  # type: ignore[misc]
    """`transformers.TrainingArguments` with transformers' own defaults, and keys for the loss and the batches."""

    objective: str = field(
        default="sft",
        metadata={
            "help": "The loss: the causal model's own (sft), one weighted by each token's probability beside a "
            "divergence from the model at the start (asft), DPO's sigmoid loss over pairs of answers (dpo), KTO's over "
            "rated answers (kto), a loss over pairs without a reference (orpo, simpo, cpo), one over labels of "
            "whole samples (classify) or of their tokens (label_tokens), a pairwise loss over scores (reward), a "
            "divergence from a teacher's words (gkd), one over pairs of texts that mean the same (embed), or over "
            "documents of which the chosen one fits (rerank), one over masked words (diffusion), or REINFORCE with "
            "rewards of a frozen copy's hidden states (ebft).",
            "choices": list(OBJECTIVES),
        },
    )
    max_length: int = field(default=1024, metadata={"help": "Tokens that a sample is cut to."})
    pad_to_multiple_of: int | None = field(
        default=None, metadata={"help": "The width of a batch is a multiple of this."}
    )
    pad_to_max_length: bool = field(default=False, metadata={"help": "Whether every row has `max_length` tokens."})
    num_labels: int = field(
        default=1, metadata={"help": "Scores of a sample or of a token: the number of classes, or 1 for a regression."}
    )
    packing: bool = field(
        default=False, metadata={"help": "Whether rows of `max_length` tokens are filled with several samples."}
    )
    block_diagonal: bool = field(
        default=False, metadata={"help": "Whether a packed sample attends to itself only, from position 0."}
    )
    float32_logits: bool = field(
        default=False,
        metadata={"help": "Whether the logits of answers are cast to float32 before the log-softmax."},
    )
    cut_cross_entropy: bool = field(
        default=False,
        metadata={"help": "Whether the model's own loss makes the logits in blocks and again in the backward pass."},
    )
    adapter_dtype: str | None = field(
        default=None,
        metadata={
            "help": "The type of LoRA's weights, or of the trained layers where the rest is frozen; None: as PEFT "
            "chooses, or as the layers are stored.",
            "choices": ["float32", "bfloat16"],
        },
    )
    peft_adapter: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Another adapter of PEFT's in place of LoRA, with use_peft: true: its peft_type (OFT, ADALORA, "
            "MISS, ...) and the options of its config."
        },
    )
    qat: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Quantisation-aware training by torchao: weight_dtype, activation_dtype, group_size, "
            "quantize_embedding; or by onebitllms: weight_dtype ternary."
        },
    )
    trainable_layers: int | None = field(
        default=None,
        metadata={
            "help": "How many of the last layers are trained, or of the first ones as a negative number; the rest of "
            "the model is frozen."
        },
    )
    layer_modules: list[str] | None = field(
        default=None,
        metadata={"help": "The modules of a layer that `trainable_layers` trains (mlp, self_attn, ...); None: all."},
    )
    extra_modules: list[str] | None = field(
        default=None,
        metadata={
            "help": "Modules outside of the layers (embed_tokens, lm_head, norm) that are trained beside "
            "`trainable_layers`, with every other weight whose name contains theirs."
        },
    )
    added_layers: int | None = field(
        default=None,
        metadata={
            "help": "How many copies of layers, spread evenly, are added to the model and trained; the rest is frozen."
        },
    )
    spread_layers: bool = field(
        default=False,
        metadata={"help": "Whether `trainable_layers` are spread evenly over the model, instead of its last ones."},
    )
    trains_rest: bool = field(
        default=False,
        metadata={
            "help": "Whether all outside of the layers (embeddings, norm, head) is trained beside `trainable_layers`."
        },
    )
    beta: float = field(
        default=0.1, metadata={"help": "The weight of the reference, or of the margin in a loss without one."}
    )
    simpo_gamma: float = field(default=0.5, metadata={"help": "The margin that SimPO asks for."})
    nll_weight: float = field(
        default=0.0, metadata={"help": "The weight of the chosen answers' cross-entropy in orpo, simpo and cpo."}
    )
    sequence_parallel_size: int = field(
        default=1, metadata={"help": "Ranks that compute parts of the same samples. It is simulated, not run."}
    )
    sequence_parallel: str = field(
        default="ulysses",
        metadata={
            "help": "How these attend to each other: by heads, and in a ring where the model has fewer (ulysses, as "
            "ms-swift), or to keys and values that are gathered head by head (gathered, as Axolotl).",
            "choices": ["ulysses", "gathered"],
        },
    )
    loss_chunk: int | None = field(
        default=None,
        metadata={
            "help": "Tokens at a time whose loss is computed where ranks share samples (ms-swift's "
            "CELOSS_PARALLEL_SIZE)."
        },
    )
    bottleneck: int | None = field(
        default=None,
        metadata={
            "help": "The width of adapters of two linear layers, one behind the MLP of every layer, which are trained "
            "alone (ms-swift's tuner_type adapter)."
        },
    )
    reft_rank: int | None = field(
        default=None,
        metadata={"help": "The rank of LoReFT, which changes the output of every layer and is trained alone."},
    )
    engine_share: float = field(
        default=0.0, metadata={"help": "The part of the card that a rollout engine beside holds. It is simulated only."}
    )
    expert_parallel_size: int = field(
        default=1, metadata={"help": "Ranks over which the experts are dealt out. It is simulated, not run."}
    )
    pruning_masks: bool = field(
        default=False,
        metadata={
            "help": "Whether each weight of a linear layer but the head's has a mask of one byte beside it, as "
            "LLM Compressor keeps pruned ones."
        },
    )
    host_experts: bool = field(
        default=False,
        metadata={
            "help": "Whether the routed experts compute in host memory (KTransformers). It is simulated, not run."
        },
    )
    loads_on_card: bool = field(
        default=False,
        metadata={"help": "Whether each rank of DDP loads its weights onto its own card, and none into host memory."},
    )
    keeps_dtype: bool = field(
        default=False,
        metadata={
            "help": "Whether FSDP2 shards weights in the dtype that they are loaded in, as Axolotl's does, where "
            "accelerate casts those that are trained to float32."
        },
    )
    teacher_model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "The frozen model that gkd learns from; None: the trained one without its adapter."},
    )
    teacher_words: int | None = field(
        default=None,
        metadata={
            "help": "How many of a token's likeliest words gkd learns; without a teacher_model_name_or_path a server "
            "tells them."
        },
    )
    answer_tokens: int | None = field(
        default=None,
        metadata={"help": "How many of a sample's last tokens gkd learns and makes logits of; None: of all."},
    )
    mask_token: int = field(default=0, metadata={"help": "The token that stands for a masked one in diffusion."})
    temperature: float = field(default=1.0, metadata={"help": "What gkd divides the logits by."})
    ebft: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Where and how ebft writes words, as in Axolotl's file: stride, context_length, generate_max_len, "
            "n_samples_per_prompt, temperature, feature_layers, use_whitening, ce_coef, ..."
        },
    )
    negatives: int = field(
        default=1, metadata={"help": "How many documents that do not fit stand beside one that fits, in rerank."}
    )
    word_scores: bool = field(
        default=False,
        metadata={"help": "Whether rerank compares the logits of two words, in place of a classifier's score."},
    )
    value_head: bool = field(
        default=False,
        metadata={
            "help": "Whether a reward model scores every token by a head beside the causal model's own, as "
            "LLaMA-Factory's, in place of a sequence classifier."
        },
    )
    keeps_logits: bool = field(
        default=False, metadata={"help": "Whether KTO keeps copies of its samples' logits to the end of its loss."}
    )
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Whether code of the model's repository on the hub may run."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = [
            f"{key} must be 1 or more; got {value}"
            for key in (
                "max_length",
                "pad_to_multiple_of",
                "added_layers",
                "num_labels",
                "teacher_words",
                "negatives",
            )
            if (value := getattr(self, key)) is not None and value < 1
        ]
        if self.packing and self.objective not in TOKENS:
            wrong.append(f"packing fills rows for objective: sft; got objective: {self.objective}; omit packing")
        if self.peft_adapter is not None and not (
            isinstance(self.peft_adapter, dict) and isinstance(self.peft_adapter.get("peft_type"), str)
        ):
            wrong.append(f"peft_adapter must be a mapping with a peft_type; got {self.peft_adapter!r}")
        if self.qat is not None and not isinstance(self.qat, dict):
            wrong.append(f"qat must be a mapping with a weight_dtype; got {self.qat!r}")
        alone = [key for key in ("bottleneck", "reft_rank", "added_layers", "trainable_layers")
                 if getattr(self, key) is not None]  # fmt: skip
        if len(alone) > 1 and {"bottleneck", "reft_rank"} & set(alone):
            wrong.append(f"{alone[0]} is trained alone; omit it or {', '.join(alone[1:])}")
        if not 0 <= self.engine_share < 1:
            wrong.append(f"engine_share must be from 0 to below 1; got {self.engine_share}")
        if self.added_layers is not None and self.trainable_layers is not None:
            wrong.append("added_layers are trained alone; omit them or trainable_layers")
        if self.spread_layers and self.trainable_layers is None:
            wrong.append("spread_layers says which layers are trained; it needs trainable_layers")
        if self.trainable_layers == 0 and not self.extra_modules:
            wrong.append("trainable_layers: 0 trains nothing without extra_modules; set one of them")
        if self.spread_layers and (self.trainable_layers or 0) < 0:
            wrong.append(f"spread_layers needs trainable_layers of 1 or more; got {self.trainable_layers}")
        if (self.layer_modules or self.extra_modules) and self.trainable_layers is None:
            wrong.append("layer_modules and extra_modules say what is trained; they need trainable_layers")
        if self.trains_rest and self.trainable_layers is None:
            wrong.append("trains_rest says what is trained beside some layers; it needs trainable_layers")
        if self.block_diagonal and self.objective == "diffusion":
            wrong.append("block_diagonal is causal; omit it with objective: diffusion")
        if self.block_diagonal and not self.packing:
            wrong.append("block_diagonal keeps packed samples apart; it needs packing: true")
        if self.cut_cross_entropy and self.objective != "sft":
            wrong.append(f"cut_cross_entropy is of objective: sft; got objective: {self.objective}; omit it")
        if self.objective != "gkd" and (self.teacher_model_name_or_path or self.teacher_words or self.answer_tokens):
            wrong.append(
                f"a teacher, or a part of the tokens to learn, is of objective: gkd; got objective: {self.objective}"
            )
        if self.sequence_parallel_size > 1 and self.objective not in ("sft", "embed"):
            wrong.append(f"sequence_parallel_size is of objective: sft or embed; got objective: {self.objective}")
        if self.loss_chunk is not None and self.sequence_parallel_size == 1:
            wrong.append("loss_chunk is of samples that ranks share; omit it or set sequence_parallel_size")
        if self.ebft is not None and (self.objective != "ebft" or not isinstance(self.ebft, dict)):
            wrong.append(f"ebft must be a mapping, with objective: ebft; got {self.ebft!r}, {self.objective}")
        if self.packing and self.objective == "ebft":
            wrong.append("packing is not of objective: ebft, whose texts stand alone; omit it")
        if self.word_scores and self.objective != "rerank":
            wrong.append(f"word_scores is of objective: rerank; got objective: {self.objective}; omit it")
        if self.value_head and self.objective != "reward":
            wrong.append(f"value_head is a reward model's; got objective: {self.objective}; omit value_head")
        if wrong:
            raise ValueError("; ".join(wrong))


def make_parser() -> Any:
    """The parser of a recipe's four parts, as TRL's scripts make it."""
    return TrlParser((ScriptArguments, HfConfig, ModelConfig, DatasetMixtureConfig))
