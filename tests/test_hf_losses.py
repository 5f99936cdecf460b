"""The losses of the plain transformers.Trainer, against the formulas of the tools."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_parsed import LENGTH, LORA, TAUGHT, parsed, rows

from autofit.errors import ConfigError
from autofit.plugin.protocol import Inspection, WorstCase
from autofit.trainers import hf_ebft, hf_losses, hf_training
from autofit.trainers.keys import hf_tiers, on_ranks


def of_loss(model: Path, folder: Path, batch: dict[str, torch.Tensor], **changes: object) -> Any:
    """(the trainer, its loss of a micro-batch)."""
    trainer = hf_training.made(parsed(model, folder, **changes), rows(parsed(model, folder, **changes)))
    return trainer, trainer.compute_loss(trainer.model, batch).item()


def sums(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The log-probability of each row but its first token (B,)."""
    with torch.no_grad():
        each = model(input_ids=ids).logits[:, :-1].float().log_softmax(-1)
    return torch.gather(each, 2, ids[:, 1:, None]).squeeze(2).sum(1)


def learn(model: Any, ids: torch.Tensor) -> None:
    """Make these rows more likely."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(4):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("float32", [True, False], ids=["LLaMA-Factory", "TRL"])
@pytest.mark.parametrize("objective", ["orpo", "simpo", "cpo"])
def test_a_loss_without_a_reference_is_that_of_the_tools(
    objective: str, float32: bool, small_model: Path, tmp_path: Path
) -> None:
    ids = torch.tensor([[5, 6, 7, 8], [9, 5, 6, 7], [8, 7, 6, 5], [6, 6, 9, 5]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    more: dict[str, object] = {"float32_logits": float32, "nll_weight": 0.5, "simpo_gamma": 0.7, "beta": 2.0}
    trainer, loss = of_loss(small_model, tmp_path, batch, objective=objective, **more)
    found = sums(trainer.model, ids)
    chosen, rejected = (found / (1 if objective == "cpo" else 3)).chunk(2)
    odds = chosen - rejected - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
    margin = {"orpo": odds, "simpo": chosen - rejected - 0.7 / 2.0, "cpo": chosen - rejected}[objective]
    nll = -(chosen.mean() if objective != "cpo" or float32 else found[:2].mean() / 3)
    wanted = -torch.nn.functional.logsigmoid(2.0 * margin).mean() + 0.5 * nll
    if objective == "orpo":  # beta weighs the odds ratio, outside of the sigmoid
        wanted = -2.0 * torch.nn.functional.logsigmoid(odds).mean() + 0.5 * nll
    assert loss == pytest.approx(wanted.item(), rel=1e-4)


def test_asfts_loss_weighs_tokens_by_their_probability_and_adds_the_divergence(
    small_model: Path, tmp_path: Path
) -> None:
    ids = torch.tensor([[5, 6, 7, 8]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    config = parsed(small_model, tmp_path, objective="asft", beta=0.3)
    trainer = hf_training.made(config, rows(config))
    learn(trainer.model, ids)
    with torch.no_grad():
        own, others = (m(input_ids=ids).logits[0, :-1].log_softmax(-1) for m in (trainer.model, trainer.reference))
    chosen = own.gather(1, ids[0, 1:, None])
    divergence = (others.exp() * (others - own)).sum(-1).mean()
    wanted = (-chosen * chosen.exp()).mean() + 0.3 * divergence
    assert divergence > 0.01
    assert trainer.compute_loss(trainer.model, batch).item() == pytest.approx(wanted.item(), rel=1e-3)


def test_ktos_loss_subtracts_what_changed_on_other_answers_and_turns_with_the_rating(
    small_model: Path, tmp_path: Path
) -> None:
    ids, other = torch.tensor([[5, 6, 7, 8], [9, 5, 6, 7]]), torch.tensor([[8, 7, 6, 5], [6, 6, 9, 5]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids, "other_input_ids": other,
             "other_attention_mask": torch.ones_like(other), "other_labels": other,
             "desirable": torch.tensor([True, False])}  # fmt: skip
    config = parsed(small_model, tmp_path, objective="kto", beta=0.5)
    trainer = hf_training.made(config, rows(config))
    before, before_other = sums(trainer.model, ids), sums(trainer.model, other)
    learn(trainer.model, other)
    ratio = sums(trainer.model, ids) - before
    shift = (sums(trainer.model, other) - before_other).mean().clamp(min=0)
    assert shift > 0.01
    wanted = (1 - torch.sigmoid(0.5 * torch.tensor([1.0, -1.0]) * (ratio - shift))).mean()
    assert trainer.compute_loss(trainer.model, batch).item() == pytest.approx(wanted.item(), rel=1e-4)


@pytest.mark.parametrize(
    ("loss", "split"),
    [
        ({"objective": "orpo", "float32_logits": True, "nll_weight": 1.0}, False),
        ({"objective": "orpo", "float32_logits": False, "nll_weight": 1.0}, True),
        ({"objective": "cpo", "float32_logits": False, "nll_weight": 0.0}, False),
        ({"objective": "kto", "float32_logits": True}, True),
    ],
)
def test_a_split_is_neutral_only_where_a_loss_is_the_mean_of_its_parts(
    loss: dict[str, object], split: bool, small_model: Path, tmp_path: Path
) -> None:
    config = parsed(small_model, tmp_path, **loss, beta=2.0)
    trainer = hf_training.made(config, rows(config))
    pairs = [{"chosen_ids": [5, 6, 7, 9], "chosen_labels": [-100, 6, 7, 9], "rejected_ids": [5, 8],
              "rejected_labels": [-100, 8], "desirable": True},
             {"chosen_ids": [9, 5], "chosen_labels": [-100, 5], "rejected_ids": [9, 6, 7],
              "rejected_labels": [-100, 6, 7], "desirable": False}]  # fmt: skip
    model = trainer.model
    if loss["objective"] == "kto":  # another model than the reference
        learn(model, torch.tensor([[9, 6, 7]]))
    together, *apart = (
        trainer.compute_loss(model, trainer.data_collator(part)).item() for part in (pairs, pairs[:1], pairs[1:])
    )
    assert (abs(sum(apart) / 2 - together) > 1e-4) is split
    assert bool(hf_tiers(loss)) is split


def test_on_several_ranks_that_normalise_by_themselves_a_split_deals_samples_to_other_ranks() -> None:
    """Axolotl's average_tokens_across_devices: false; proven on two ranks, the gradient differed by 29 %."""
    apart, split = {"launch.ranks": "approximate"}, {"per_device_train_batch_size": "approximate"}
    tiers = hf_tiers({"objective": "sft", "average_tokens_across_devices": False})
    assert tiers == apart
    assert on_ranks(tiers, many=True, generates=False) == {**apart, **split}
    assert on_ranks(tiers, many=True, generates=True) == apart
    assert on_ranks(tiers, many=False, generates=False) == {}
    asked = Inspection(device="sim:t4", worst_case=WorstCase(path=Path("none")))
    assert [replace(asked, ranks=ranks, cards=cards).many for ranks, cards in ((1, None), (1, 2), (2, 1))] == [
        False, True, False,
    ]  # fmt: skip


def test_gkds_loss_is_the_divergence_of_the_words_of_both_models(small_model: Path, tmp_path: Path) -> None:
    ids = torch.tensor([[5, 6, 7, 8]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor([[-100, 6, 7, 8]])}
    config = parsed(small_model, tmp_path, **TAUGHT, objective="gkd", beta=0.25, temperature=0.5)
    trainer = hf_training.made(config, rows(config))
    learn(trainer.model, ids)
    with torch.no_grad():
        own, others = ((m(input_ids=ids).logits[0, :-1] / 0.5).softmax(-1) for m in (trainer.model, trainer.reference))
    mixed = 0.75 * own + 0.25 * others
    wanted = (0.25 * others * (others / mixed).log() + 0.75 * own * (own / mixed).log()).sum(-1).mean()
    assert wanted > 0.01
    assert trainer.compute_loss(trainer.model, batch).item() == pytest.approx(wanted.item(), rel=1e-3)


def test_the_smaller_vocabulary_is_filled_up_from_the_larger_one() -> None:
    own, others = torch.ones(2, 3), torch.full((2, 5), 7.0)
    assert hf_losses._same_width(own, others)[0].tolist() == [[1, 1, 1, 7, 7]] * 2
    assert hf_losses._same_width(others, own)[1].tolist() == [[1, 1, 1, 7, 7]] * 2


def test_an_embedding_is_the_normalised_state_of_the_last_token_and_is_compared_with_all_of_its_batch(
    small_model: Path, tmp_path: Path
) -> None:
    config = parsed(small_model, tmp_path, objective="embed")
    plain = hf_training.model_of(config)
    trainer = hf_training.made(config, rows(config))
    trainer.model.load_state_dict(plain.state_dict())
    texts = [[5, 6, 7], [8, 9], [5, 6], [8, 9, 7]]
    pairs = [{"chosen_ids": a, "chosen_labels": a, "rejected_ids": b, "rejected_labels": b}
             for a, b in zip(texts[:2], texts[2:], strict=True)]  # fmt: skip
    with torch.no_grad():
        found = torch.stack([plain.model(torch.tensor([ids])).last_hidden_state[0, -1] for ids in texts])
    found = torch.nn.functional.normalize(found, dim=1)
    wanted = torch.nn.functional.cross_entropy(found[:2] @ found[2:].T / 0.1, torch.tensor([0, 1]))
    assert trainer.compute_loss(trainer.model, trainer.data_collator(pairs)).item() == pytest.approx(
        wanted.item(), rel=1e-4
    )


def test_diffusion_predicts_a_masked_word_from_the_place_before_it_and_from_the_words_behind(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parsed(small_model, tmp_path, objective="diffusion", mask_token=3)
    trainer = hf_training.made(config, rows(config))
    monkeypatch.setattr(
        torch, "rand", lambda *size, **_: torch.full(size[0] if isinstance(size[0], torch.Size) else size, 0.5)
    )
    trainer.masks_all = True
    ids = torch.tensor([[5, 6, 7, 8]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor([[-100, -100, 7, 8]])}
    with torch.no_grad():
        seen = torch.ones((1, 1, 4, 4), dtype=torch.bool)
        logits = trainer.model(torch.tensor([[5, 6, 3, 3]]), attention_mask=seen).logits[0, 1:3]
    each = torch.nn.functional.cross_entropy(logits, ids[0, 2:], reduction="none")
    wanted = (each / (1e-3 + 0.999 * 0.5)).sum() / 4
    assert trainer.compute_loss(trainer.model, batch).item() == pytest.approx(wanted.item(), rel=1e-4)


@pytest.mark.parametrize("prompt", [0, 40])
def test_words_at_each_anchor_see_the_text_before_it_and_are_scored_by_what_they_are_like(
    prompt: int, small_model: Path, tmp_path: Path
) -> None:
    strides = {"stride": 8, "context_length": 8, "generate_max_len": 4, "n_samples_per_prompt": 2, "ce_coef": 0.5}
    config = parsed(small_model, tmp_path, objective="ebft", ebft=strides, **LORA)
    trainer = hf_training.made(config, rows(config))
    ids = torch.arange(2 * LENGTH).view(2, LENGTH) % 50
    labels = ids.clone()
    labels[:, :prompt] = -100
    written = list[tuple[int, int]]()
    scores = trainer._scores

    def counted(model: Any, found: torch.Tensor, *more: Any) -> Any:
        written.append((found.shape[0], found.shape[1]))
        return scores(model, found, *more)

    trainer._scores = counted
    loss = trainer.compute_loss(trainer.model, {"input_ids": ids, "labels": labels})
    loss.backward()
    first = max(prompt, 8)
    anchors = (LENGTH - 4 - first) // 8 + 1
    assert written == [(4, LENGTH + 4 * anchors)]
    assert any(p.grad.abs().sum() > 0 for p in trainer.model.parameters() if p.grad is not None)


def test_a_word_sees_its_own_anchor_and_no_other(tmp_path: Path) -> None:
    told = hf_ebft.Strides(stride=4, context_length=3, generate_max_len=2)
    geometry = hf_ebft._Geometry(told=told, text=12, first=3, anchors=2)
    mask, places = geometry.dense_mask(16, 2, 1, torch.device("cpu"), torch.float32)
    seen = [row.nonzero()[:, 0].tolist() for row in mask[0, 0] == 0]
    assert seen[11] == list(range(12))
    assert seen[12:] == [[0, 1, 2, 12], [*range(7), 13], [0, 1, 2, 12, 14], [*range(7), 13, 15]]
    assert places[0, 12:].tolist() == [3, 7, 4, 8]


def test_what_is_no_setting_of_ebft_is_named(small_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ebft has no key 'strid'; the nearest valid one is 'stride'"):
        hf_ebft.Strides.of({"strid": 4})
    with pytest.raises(ConfigError, match="ebft must be a mapping, with objective: ebft"):
        parsed(small_model, tmp_path, ebft={"stride": 4})


def test_a_reranker_by_words_scores_the_last_token_by_the_difference_of_two_words(
    small_model: Path, tmp_path: Path
) -> None:
    config = parsed(small_model, tmp_path, objective="rerank", word_scores=True, negatives=2)
    plain = hf_training.model_of(config)
    trainer = hf_training.made(config, rows(config))
    trainer.model.load_state_dict(plain.state_dict())
    fits, other = [5, 6, 7], [8, 9]
    row = {"chosen_ids": fits, "chosen_labels": fits, "rejected_ids": other, "rejected_labels": other}
    with torch.no_grad():
        logits = [plain(torch.tensor([ids])).logits[0, -1] for ids in (fits, other, other)]
    scores = torch.stack([one[0] - one[1] for one in logits])
    wanted = torch.nn.functional.binary_cross_entropy_with_logits(scores, torch.tensor([1.0, 0.0, 0.0]))
    assert trainer.compute_loss(trainer.model, trainer.data_collator([row])).item() == pytest.approx(
        wanted.item(), rel=1e-4
    )
