"""Energy-based fine-tuning on whole texts, as Axolotl's strided trainer does it. Imports torch.

Read in Axolotl at 067b021c, core/trainers/ebft/strided.py: at places of equal distance in a text (anchors), a few words
are written by the model, all anchors at once under one mask (eager attention, in a pass over text and words for each
word); a second pass has gradients (flex attention on a card); a frozen copy, or the model without its adapter, tells
by hidden states how like the text they are; and the loss is REINFORCE with these rewards.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
from peft import PeftModel
from torch.nn.functional import cosine_similarity, log_softmax, normalize

from autofit.errors import ConfigError, nearest, quoted
from autofit.fakegpu.patches.cuda_api import active_gpu
from autofit.recipe.yaml_file import accepts, readable

from .features import whitened
from .hf_data import IGNORED
from .hf_losses import Batch, MicroBatchMean

_CHUNK = 256  # tokens at a time whose logits are made


@dataclass(frozen=True, slots=True, kw_only=True)
class Strides:
    """The keys of `ebft` in Axolotl's file, with its defaults (utils/schemas/config.py, EBFTConfig)."""

    stride: int = 8  # tokens from an anchor to the next
    context_length: int = 8  # tokens before the first anchor
    generate_max_len: int = 8  # words that are written at each anchor
    n_samples_per_prompt: int = 4  # times that each text is written
    temperature: float = 0.6
    top_p: float = 1.0
    feature_layers: Sequence[float] = (0.25, 0.5, 0.75)
    embed_method: str = "last_token"
    use_whitening: bool = False
    alignment_coef: float = 1.0
    diversity_coef: float = 1.0
    rl_coef: float = 1.0
    ce_coef: float = 0.0
    advantage_estimator: str = "rloo"
    min_completion_prefix: int = 0

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Strides":
        """The settings of a mapping. Raises ConfigError for what is none of them."""
        kinds = {field.name: field.type for field in fields(cls)}
        wrong = [f"ebft has no key {quoted(key)}{nearest(key, kinds)}" for key in given if key not in kinds]
        wrong += [
            f"ebft: {key} must be {readable(kinds[key])}; got {value!r}"
            for key, value in given.items()
            if key in kinds and not accepts(value, kinds[key])
        ]
        if wrong:
            raise ConfigError("; ".join(wrong))
        return cls(**given)

    def anchors(self, tokens: int, first: int) -> int:
        """Number of anchors of a text of `tokens` from the token `first` on."""
        return (tokens - self.generate_max_len - first) // self.stride + 1


class EbftTrainer(MicroBatchMean, alike=False):
    """Axolotl's AxolotlStridedEBFTTrainer. With several ranks each card holds one frozen copy, be it a neighbour's."""

    def __init__(self, *args: Any, strides: Strides, **more: Any) -> None:
        super().__init__(*args, **more)
        self.strides = strides
        model = self.accelerator.unwrap_model(self.model)
        self.flex = next(model.parameters()).device.type == "cuda"
        model.config._attn_implementation = "flex_attention" if self.flex else "eager"
        self.features: Any = None
        if not isinstance(model, PeftModel) or self.accelerator.num_processes > 1:
            self.features = copy.deepcopy(model).to(torch.bfloat16).requires_grad_(False).eval()
        layers = model.config.num_hidden_layers
        self.places = [int(part * layers) for part in strides.feature_layers]

    def compute_loss(
        self, model: Any, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean over the words that were written in a micro-batch, and with `ce_coef` over the others too."""
        told, ids = self.strides, inputs["input_ids"]
        tokens = ids.shape[1]
        prompts = self._prompts(inputs["labels"])
        structured = min(prompts) > 0
        first = told.context_length
        if structured:
            first = max(max(prompts) + told.min_completion_prefix, first)
        anchors = told.anchors(tokens, first)
        if anchors <= 0:
            loss = ids.float().mean() * 0.0
            return (loss, None) if return_outputs else loss
        samples = told.n_samples_per_prompt
        with torch.no_grad():
            written = self._write(model, ids.repeat_interleave(samples, dim=0), anchors, first)
        _free_cache(written)
        rows, wide = written.shape
        geometry = _Geometry(told=told, text=tokens, first=first, anchors=anchors)
        places = geometry.positions(wide, told.generate_max_len, rows, written.device)
        if self.flex:
            mask: Any = geometry.block_mask(wide, rows, written.device)
        else:
            mask, _ = geometry.dense_mask(
                wide, told.generate_max_len, rows, written.device, next(model.parameters()).dtype
            )
        start = tokens - 1
        scores, outputs = self._scores(model, written, mask, places, 0 if told.ce_coef > 0 else start)
        words = torch.zeros(scores.shape, dtype=torch.bool, device=written.device)
        words[:, start : start + anchors * told.generate_max_len] = True
        with torch.no_grad():
            rewards = self._rewards(written, places, geometry, len(ids))
        del mask, places
        _free_cache(written)
        advantages = _advantages(rewards, told.advantage_estimator).view(rows, anchors)
        each = advantages.repeat_interleave(told.generate_max_len, dim=1)
        whole = torch.zeros_like(scores)
        whole[:, start : start + each.shape[1]] = each
        loss_of_words = -scores * whole.detach()
        loss = told.rl_coef * ((loss_of_words * words.float()).sum() / words.float().sum().clamp(min=1))
        if told.ce_coef > 0:
            others = self._of_the_text(inputs, words, start, structured=structured)
            of_text = (-scores * others.float()).sum() / others.float().sum().clamp(min=1)
            loss = loss + told.ce_coef * of_text
        return (loss, outputs) if return_outputs else loss

    def _prompts(self, labels: torch.Tensor) -> list[int]:
        """The tokens of each text's prompt, which have no label."""
        counted = labels != IGNORED
        first = torch.where(counted.any(dim=1), counted.float().argmax(dim=1), float(labels.shape[1]))
        return [int(count) for count in first.long().tolist()]

    def _write(self, model: Any, rows: torch.Tensor, anchors: int, first: int) -> torch.Tensor:
        """The texts (rows, tokens) with the words that were written behind them (rows, tokens + words)."""
        told, tokens = self.strides, rows.shape[1]
        geometry = _Geometry(told=told, text=tokens, first=first, anchors=anchors)
        dtype, whole = next(model.parameters()).dtype, rows.clone()
        with _attending(self.accelerator.unwrap_model(model), "eager"):
            for step in range(told.generate_max_len):
                mask, places = geometry.dense_mask(whole.shape[1], step, len(rows), rows.device, dtype)
                with _half(rows):
                    output = model(whole, attention_mask=mask, position_ids=places, return_dict=True)
                logits = output.logits
                at = [geometry.before(step, anchor) for anchor in range(anchors)]
                own = logits.index_select(1, torch.tensor(at, device=rows.device))
                if told.temperature > 0:
                    own = own / told.temperature
                    shares = torch.softmax(own, dim=-1)
                    if told.top_p < 1.0:
                        shares = _likeliest(shares, told.top_p)
                    drawn = torch.multinomial(shares.view(-1, shares.shape[-1]), 1).squeeze(-1)
                    drawn = drawn.view(len(rows), anchors)
                else:
                    drawn = torch.argmax(own, dim=-1)
                whole = torch.cat([whole, drawn], dim=1)
        return whole

    def _scores(
        self, model: Any, written: torch.Tensor, mask: Any, places: torch.Tensor, begin: int
    ) -> tuple[torch.Tensor, Any]:
        """The log-probability of each token from `begin` on (rows, tokens), row by row where the model has a head.

        A model without an adapter is not taken apart by Axolotl: its logits are of all rows and tokens.
        """
        outer = self.accelerator.unwrap_model(model)
        inner = getattr(outer, "model", outer)
        targets = written[:, 1:]
        if not (hasattr(inner, "model") and hasattr(inner, "lm_head")):
            with _half(written):
                outputs = model(written, attention_mask=mask, position_ids=places, return_dict=True)
            logits = outputs.logits
            found = torch.zeros(*targets.shape, device=written.device, dtype=torch.float32)
            region, labels = logits[:, begin:-1, :], targets[:, begin:]
            for i in range(0, region.shape[1], _CHUNK):
                part = log_softmax(region[:, i : i + _CHUNK, :].float(), dim=-1)
                told = part.gather(-1, labels[:, i : i + _CHUNK].unsqueeze(-1)).squeeze(-1)
                found[:, begin + i : begin + i + part.shape[1]] = told
            return found, outputs
        each = []
        for row in range(len(written)):
            own = mask[row : row + 1] if isinstance(mask, torch.Tensor) else mask
            with _half(written):
                out = inner.model(
                    written[row : row + 1], attention_mask=own, position_ids=places[row : row + 1], return_dict=True
                )
            hidden = out.last_hidden_state
            found = torch.zeros(1, hidden.shape[1] - 1, device=written.device, dtype=torch.float32)
            region, labels = hidden[:, begin:-1, :], targets[row : row + 1, begin:]
            for i in range(0, region.shape[1], _CHUNK):
                with _half(written):
                    logits = inner.lm_head(region[:, i : i + _CHUNK, :])
                part = log_softmax(logits.float(), dim=-1)
                told = part.gather(-1, labels[:, i : i + _CHUNK].unsqueeze(-1)).squeeze(-1)
                found[:, begin + i : begin + i + part.shape[1]] = told
                del logits, part
            each.append(found)
            del hidden, out, region
        return torch.cat(each, dim=0), None

    def _rewards(self, written: torch.Tensor, places: torch.Tensor, geometry: "_Geometry", texts: int) -> torch.Tensor:
        """Likeness of the words at each anchor to the text, less that to each other (texts, samples, anchors)."""
        told, anchors, length = self.strides, geometry.anchors, self.strides.generate_max_len
        rows = len(written)
        samples = rows // texts
        features = self._features(written, places, geometry)
        text = features[:, geometry.first : geometry.text, :]
        words = features[:, geometry.text : geometry.text + anchors * length, :]
        of_text = text.unfold(1, length, told.stride).permute(0, 1, 3, 2)
        of_words = words.reshape(rows, length, anchors, -1).transpose(1, 2)
        if told.embed_method == "mean_pooling":
            true, own = of_text.mean(dim=2), of_words.mean(dim=2)
        else:
            true, own = of_text[:, :, -1, :], of_words[:, :, -1, :]
        true, own = (part.view(texts, samples, anchors, -1) for part in (true, own))
        if told.use_whitening:
            pairs = [
                whitened(own[text, :, anchor, :], true[text, :, anchor, :])
                for text in range(texts)
                for anchor in range(anchors)
            ]
            own, true = (
                torch.stack([pair[side] for pair in pairs]).view(texts, anchors, samples, -1).transpose(1, 2)
                for side in (0, 1)
            )
        alike = cosine_similarity(own, true, dim=-1)
        among = torch.zeros_like(alike)
        if samples > 1:
            grouped = own.permute(0, 2, 1, 3).reshape(texts * anchors, samples, -1)
            likeness = torch.bmm(grouped, grouped.transpose(1, 2))
            same = torch.eye(samples, device=written.device, dtype=torch.bool)
            likeness = likeness.masked_fill(same.unsqueeze(0), 0.0)
            among = (likeness.sum(dim=-1) / (samples - 1)).view(texts, anchors, samples).permute(0, 2, 1)
        return told.alignment_coef * (alike * 2) - told.diversity_coef * (among * 2)

    def _features(self, written: torch.Tensor, places: torch.Tensor, geometry: "_Geometry") -> torch.Tensor:
        """Normalised hidden states of some layers, side by side (rows, tokens, layers x hidden)."""
        told, (rows, wide) = self.strides, written.shape
        shared = self.features is None
        model = self.accelerator.unwrap_model(self.model) if shared else self.features
        if shared or not self.flex:
            kind = torch.bfloat16 if self.flex else next(model.parameters()).dtype
            mask, _ = geometry.dense_mask(wide, told.generate_max_len, rows, written.device, kind)
        else:
            mask = geometry.block_mask(wide, rows, written.device)
        without = model.disable_adapter() if shared else nullcontext()
        attending = _attending(model, "sdpa") if shared else nullcontext()
        with without, attending, _half(written):
            trains = model.training
            model.eval()
            outputs = model(
                written, attention_mask=mask, position_ids=places, output_hidden_states=True, return_dict=True
            )
            model.train(trains)
        states = [outputs.hidden_states[place] for place in self.places]
        del outputs, mask
        each = [normalize(layer, p=2, dim=-1) for layer in states]
        return torch.cat(each, dim=-1)

    def _of_the_text(self, inputs: Batch, words: torch.Tensor, start: int, *, structured: bool) -> torch.Tensor:
        """Mask (rows, tokens) of what counts in the cross-entropy: the answer, or all that was not written."""
        if not structured:
            return ~words
        answers = (inputs["labels"][:, 1:] != IGNORED).repeat_interleave(self.strides.n_samples_per_prompt, dim=0)
        found = torch.zeros_like(words)
        found[:, : answers.shape[1]] = answers
        found[:, start:] = False
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Geometry:
    """Places of the words of a text's anchors: behind its `text` tokens, the first words of all anchors, then the
    second ones. Each sees the text up to its anchor and the words of its own anchor."""

    told: Strides
    text: int
    first: int
    anchors: int

    def before(self, step: int, anchor: int) -> int:
        """The token whose logits tell the word `step` of an anchor."""
        if step == 0:
            return self.first + anchor * self.told.stride - 1
        return self.text + (step - 1) * self.anchors + anchor

    def positions(self, wide: int, steps: int, rows: int, device: torch.device) -> torch.Tensor:
        found = torch.empty((rows, wide), dtype=torch.long, device=device)
        found[:, : self.text] = torch.arange(self.text, device=device)
        starts = torch.arange(self.anchors, device=device) * self.told.stride + self.first
        for step in range(steps):
            begin = self.text + step * self.anchors
            found[:, begin : begin + self.anchors] = starts + step
        return found

    def dense_mask(
        self, wide: int, steps: int, rows: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(mask (rows, 1, wide, wide) to be added to the scores, positions).

        Axolotl writes it by a launch or more a word; here it is written at once, and a simulated card is told of those.
        """
        mask = torch.full((rows, 1, wide, wide), torch.finfo(dtype).min, dtype=dtype, device=device)
        causal = torch.tril(torch.ones((self.text, self.text), dtype=torch.bool, device=device))
        mask[:, :, : self.text, : self.text].masked_fill_(causal.view(1, 1, self.text, self.text), 0.0)
        if steps:
            place = torch.arange(wide, device=device)
            written = steps * self.anchors
            words = mask[:, 0, self.text : self.text + written, :]
            words.masked_fill_(self._sees(place[self.text : self.text + written, None], place[None, :]), 0.0)
        if (gpu := active_gpu()) is not None:
            launches = self.anchors * (2 * steps + steps * (steps - 1) // 2)
            for _ in range(launches):
                gpu.clock.kernel(flops=0, nbytes=rows * self.text * dtype.itemsize, rate=gpu.spec.fp32_flops_per_s)
        return mask, self.positions(wide, steps, rows, device)

    def _sees(self, query: Any, key: Any) -> Any:
        """True where a written word sees a token: the text up to its anchor, itself, and the words before it."""
        word, other = query - self.text, key - self.text
        anchor = word % self.anchors
        until = torch.clamp(anchor * self.told.stride + self.first, max=self.text - self.told.generate_max_len)
        own = (other >= 0) & (other % self.anchors == anchor) & (other <= word)
        return ((other < 0) & (key < until)) | own

    def block_mask(self, wide: int, rows: int, device: torch.device) -> Any:
        """The same for flex attention."""
        from torch.nn.attention.flex_attention import create_block_mask

        def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
            of_text = query < self.text
            return (of_text & (query >= key)) | (~of_text & self._sees(query, key))

        return create_block_mask(sees, B=rows, H=None, Q_LEN=wide, KV_LEN=wide, device=device)


def _advantages(rewards: torch.Tensor, estimator: str) -> torch.Tensor:
    """Rewards (texts, samples, anchors) less those of the other samples, or by their mean and spread."""
    samples = rewards.shape[1]
    if estimator == "rloo" and samples > 1:
        return rewards - (rewards.sum(dim=1, keepdim=True) - rewards) / (samples - 1)
    if estimator == "group_norm" and samples > 1:
        return (rewards - rewards.mean(dim=1, keepdim=True)) / (rewards.std(dim=1, keepdim=True) + 1e-8)
    return rewards


def _likeliest(shares: torch.Tensor, most: float) -> torch.Tensor:
    """The shares of the likeliest words that are `most` together; the others are 0."""
    ordered, places = torch.sort(shares, descending=True, dim=-1)
    removed = torch.cumsum(ordered, dim=-1) > most
    removed[..., 1:] = removed[..., :-1].clone()
    removed[..., 0] = False
    mask = torch.zeros_like(shares, dtype=torch.bool)
    mask.scatter_(-1, places, removed)
    kept = shares.masked_fill(mask, 0)
    return kept / kept.sum(dim=-1, keepdim=True)


def _half(like: torch.Tensor) -> AbstractContextManager[Any]:
    """bfloat16 on a card, whatever the recipe says."""
    return torch.autocast("cuda", torch.bfloat16) if like.device.type == "cuda" else nullcontext()


@contextmanager
def _attending(model: Any, by: str) -> Iterator[None]:
    usual = model.config._attn_implementation
    model.config._attn_implementation = by
    try:
        yield
    finally:
        model.config._attn_implementation = usual


def _free_cache(like: torch.Tensor) -> None:
    if like.device.type == "cuda":
        torch.cuda.empty_cache()
