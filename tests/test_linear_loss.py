"""Losses that never hold the logits of all tokens: the value and gradients of the cross-entropy, without its bytes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.integrations.liger import apply_liger_kernel

from autofit.fakegpu import fake_gpu
from autofit.fakegpu.linear_loss import CUT, LIGER, fuse, in_proportion

WORDS, TOKENS = 5000, 96  # more than two blocks of words


def model(*, tied: bool = False, hidden: int = 32) -> Any:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=WORDS, hidden_size=hidden, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, tie_word_embeddings=tied,
        )
    ).train()  # fmt: skip


def learned(model: Any, count: int | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    ids = torch.arange(TOKENS).view(2, -1) * 37 % WORDS
    labels = ids.clone()
    labels[0, :20] = -100
    counted = {} if count is None else {"num_items_in_batch": torch.tensor(count)}
    output = model(input_ids=ids, labels=labels, **counted)
    output.loss.backward()
    return output.loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("loss", [LIGER, CUT], ids=["liger", "cut"])
@pytest.mark.parametrize(("tied", "frozen", "count"), [(False, False, None), (True, False, 7), (False, True, None)])
def test_value_and_gradients_are_those_of_the_cross_entropy(
    loss: Callable[..., torch.Tensor], tied: bool, frozen: bool, count: int | None
) -> None:
    plain = model(tied=tied)
    if frozen:
        plain.lm_head.requires_grad_(False)
    fused = copy.deepcopy(plain)
    assert fuse(fused, loss)
    (wanted, gradients), (found, others) = learned(plain, count), learned(fused, count)
    torch.testing.assert_close(found, wanted)
    for ours, theirs in zip(others, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    some = torch.zeros(1, 4, dtype=torch.long)
    assert fused.eval()(input_ids=some).logits.shape == (1, 4, WORDS)
    evaluated = fused(input_ids=some, labels=some)  # with labels Cut Cross-Entropy makes none
    assert (evaluated.logits is None) is (loss is CUT)
    torch.testing.assert_close(evaluated.loss, plain.eval()(input_ids=some, labels=some).loss)


def test_a_head_that_is_no_plain_linear_layer_keeps_its_logits() -> None:
    given = model()
    given.lm_head = torch.nn.Sequential(given.lm_head)
    assert not fuse(given, CUT)


def peak_bytes(prepare: Callable[[Any], object], tokens: int) -> int:
    with fake_gpu("a100-40gb"):
        made = model(hidden=256).to("cuda", torch.bfloat16)
        prepare(made)
        ids = torch.zeros(1, tokens, dtype=torch.long, device="cuda")
        made(input_ids=ids, labels=ids).loss.backward()
        return torch.cuda.max_memory_allocated()


def test_on_a_card_a_token_more_needs_no_logits_of_all_words() -> None:
    """What 4,096 tokens more need is below one float32 copy of their logits, with Liger's loss and with the cut one."""
    for prepare in (lambda made: apply_liger_kernel(made, None), lambda made: fuse(made, CUT)):
        grown = peak_bytes(prepare, 8192) - peak_bytes(prepare, 4096)
        assert grown < 4096 * WORDS * 4
    assert peak_bytes(lambda made: None, 8192) - peak_bytes(lambda made: None, 4096) > 2 * 4096 * WORDS * 4


def most_held(samples: int, own: int) -> int:
    """Peak bytes of the loss and its backward, of `samples` of 1,024 tokens; in proportion to `own` of them."""
    with in_proportion(own * 1024), fake_gpu("a100-80gb"):
        hidden = torch.zeros(samples * 1024, 2048, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        weight = torch.zeros(128_256, 2048, dtype=torch.bfloat16, device="cuda")
        before = torch.cuda.memory_allocated()
        labels = torch.zeros(samples * 1024, dtype=torch.long, device="cuda")
        LIGER(hidden, weight, labels, torch.ones((), device="cuda")).backward()
        return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("own", [1, 3])
def test_in_proportion_ligers_loss_grows_by_as_much_for_each_sample_and_is_right_at_powers_of_two_of_them(
    own: int,
) -> None:
    """Of two and three samples it takes as many tokens at once: 32 were told to take so few too, and be 27 % faster."""
    two, three, many = (most_held(samples, own) for samples in (2, 3, 16 * own))
    assert many == pytest.approx(most_held(16 * own, 0), rel=1e-3)
    assert two + (16 * own - 2) * (three - two) == pytest.approx(many, rel=0.03)  # whole tokens
