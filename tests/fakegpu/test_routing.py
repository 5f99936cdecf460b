"""Mixtures of experts: each expert gets its share of the tokens, in every way that their libraries run them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from autofit.fakegpu import FakeGpu, FakeGpuError, fake_gpu
from autofit.fakegpu.known_values import balanced_choice

TOKENS, EXPERTS, CHOSEN = 512, 16, 2
SMALL: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
    "head_dim": 16,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": EXPERTS, "intermediate_size": 128},
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 128},
    "deepseek_v3": {
        "head_dim": 8, "n_routed_experts": EXPERTS, "moe_intermediate_size": 128, "n_group": 4, "topk_group": 2,
        "first_k_dense_replace": 0, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 16,
    },
    "gpt_oss": {"num_local_experts": EXPERTS, "intermediate_size": 128},
}  # fmt: skip


def test_each_token_has_different_experts_and_each_expert_its_share() -> None:
    for tokens, k, experts in ((1, 1, 4), (5, 2, 4), (7, 3, 8), (100, 8, 128), (3, 4, 4)):
        choice = balanced_choice(tokens, k, experts)
        counts = torch.bincount(choice.flatten(), minlength=experts)
        assert all(len(set(row)) == k for row in choice.tolist())
        assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize(("imbalance", "most"), [(1.5, 96), (4.0, 256), (100.0, 512)])
def test_one_expert_gets_as_many_times_its_share_as_is_asked_for(imbalance: float, most: int) -> None:
    choice = balanced_choice(512, 2, 16, imbalance)
    counts = torch.bincount(choice.flatten(), minlength=16)
    assert counts[0] == most
    assert counts.sum() == 2 * 512
    assert counts[1:].max() - counts[1:].min() <= 1
    assert all(len(set(row)) == 2 for row in choice.tolist())


def test_an_imbalance_below_an_even_share_is_refused() -> None:
    with (
        pytest.raises(FakeGpuError, match="expert_imbalance is a share over an even one"),
        fake_gpu("l4", expert_imbalance=0.5),
    ):
        pass


def activations_and_flops(gpu: FakeGpu, kind: str, experts: str) -> tuple[int, int]:
    """Bytes held for backward by the model's forward pass, and the FLOPs of both."""
    config = AutoConfig.for_model(kind, num_experts_per_tok=CHOSEN, **SMALL | KINDS[kind])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, experts_implementation=experts).cuda()
    ids = torch.randint(97, (2, TOKENS // 2), device="cuda")
    before, flops = torch.cuda.memory_allocated(), gpu.clock.flops
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    held = torch.cuda.memory_allocated() - before
    loss.backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "expert" in name)
    return held, gpu.clock.flops - flops


@pytest.mark.parametrize("kind", KINDS)
def test_eager_experts_compute_as_much_as_grouped_ones_and_no_expert_sees_every_token(kind: str) -> None:
    with fake_gpu("h100-80gb") as gpu:
        grouped_bytes, grouped = activations_and_flops(gpu, kind, "grouped_mm")
        eager_bytes, eager = activations_and_flops(gpu, kind, "eager")
    assert eager == grouped
    assert eager_bytes < 1.5 * grouped_bytes  # each of 16 experts with every token: 8 times the experts' part
    assert any("taken as balanced" in note for note in gpu.notes)


class OldExperts(torch.nn.Module):
    """The loop of transformers 4: a list of experts, each with the tokens that a mask says are its own."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(64, experts)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(experts))
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = torch.topk(self.gate(x).softmax(-1), CHOSEN, dim=-1)
        mask = torch.nn.functional.one_hot(chosen, num_classes=len(self.experts)).permute(2, 1, 0)
        out = torch.zeros_like(x)
        for number in self.hit(mask):
            place, token = torch.where(mask[number].squeeze(0))
            self.seen.append(len(token))
            part = self.experts[number](x[None, token].reshape(-1, 64)) * weights[token, place, None]
            out.index_add_(0, token, part)
        return out

    def hit(self, mask: torch.Tensor) -> Iterator[Any]:
        yield from torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()


class AllExperts(OldExperts):
    """The loop before it skipped experts without tokens."""

    def hit(self, mask: torch.Tensor) -> Iterator[Any]:
        yield from range(len(self.experts))


@pytest.mark.parametrize("tokens", [48, 50_000])  # the one-hot tensor of the latter is too large to be known
@pytest.mark.parametrize("kind", [OldExperts, AllExperts])
def test_the_loops_of_older_versions_give_each_expert_its_share(kind: type[OldExperts], tokens: int) -> None:
    with fake_gpu("h100-80gb"):
        model = kind(EXPERTS).cuda()
        x = torch.zeros(tokens, 64, device="cuda", requires_grad=True)
        model(x).sum().backward()
        assert x.grad is not None
    assert sum(model.seen) == CHOSEN * tokens
    assert max(model.seen) - min(model.seen) <= 1
    assert len(model.seen) == EXPERTS


def test_an_imbalance_grows_what_the_most_loaded_expert_holds() -> None:
    with fake_gpu("h100-80gb", expert_imbalance=3.0) as gpu:
        model = OldExperts(EXPERTS).cuda()
        model(torch.zeros(800, 64, device="cuda")).sum().backward()
    assert model.seen[0] == 3 * CHOSEN * 800 // EXPERTS
    assert any("one expert 3 times its share" in note for note in gpu.notes)


def test_a_choice_of_tokens_to_sample_from_is_no_router() -> None:
    with fake_gpu("l40s") as gpu:
        table = torch.nn.Embedding(300, 16).cuda()
        scores = table(torch.zeros(4, dtype=torch.long, device="cuda")) @ table.weight.T
        chosen = scores.topk(5).indices
        assert gpu.tracer.shadows.of(chosen) is None


def test_counting_and_sorting_see_the_same_choice() -> None:
    with fake_gpu("l4"):
        scores = torch.zeros(64, 64, device="cuda") @ torch.nn.Linear(64, EXPERTS, device="cuda").weight.T
        chosen = scores.topk(CHOSEN).indices.flatten()
        assert torch.bincount(chosen, minlength=EXPERTS).tolist() == [8] * EXPERTS
        assert chosen.sort().values.tolist() == [e for e in range(EXPERTS) for _ in range(8)]
