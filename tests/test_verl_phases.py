"""verl's phases on a simulated card: their order, bytes and seconds."""

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from at_once import probed
from probed_anew import probed_anew
from rank_peaks import real_peaks
from verl_files import ACTOR, BUDGET, QWEN, ROLLOUT, script

from autofit.api.verl import VerlLog, rows_of
from autofit.errors import ConfigError
from autofit.fakegpu import fake_gpu
from autofit.fakegpu.engines.forward import Decoder
from autofit.fakegpu.engines.vllm import adapter_bytes
from autofit.frontends import verl_recipe, verl_rules
from autofit.plugin.protocol import Inspection, Report, Task, WorstCase
from autofit.plugin.ranks import simulated_rank
from autofit.probing.fork_server import ForkServer
from autofit.probing.prepare import prepare, worst_case_path
from autofit.probing.result import ProbeRequest, ProbeResult
from autofit.recipe.keys import LAUNCH
from autofit.recipe.launch import Launch, Sharding
from autofit.recipe.yaml_file import Source
from autofit.trainers.verl import TRAINER

pytestmark = pytest.mark.usefixtures("own_environment")


class Peaks(Report):
    """The peak allocated bytes of each phase in the second step, and what is held as each phase ends."""

    def __init__(self, gpu: Any) -> None:
        self.gpu, self._phase, self._step = gpu, "update", 0
        self.peaks: defaultdict[str, int] = defaultdict(int)
        self.held: dict[str, int] = {}

    def enter(self, phase: str) -> str:
        left, self._phase = self._phase, phase
        allocator = self.gpu.memory.allocator
        if self._step:
            self.peaks[left] = max(self.peaks[left], allocator.peak_allocated_bytes)
            self.held[left] = allocator.allocated_bytes
        allocator.peak_allocated_bytes = allocator.allocated_bytes
        return left

    def step_begins(self, step: int) -> None:
        self._step = step
        self.enter("update")

    def gradient_is_whole(self, model: object, optimizer: object) -> None:
        self.enter("optimizer")

    def optimizer_ends(self) -> None:
        self.enter("update")


TWO: dict[str, Any] = {"gradient_accumulation_steps": 2, "steps_per_generation": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("model"), hidden=64, layers=2)


def values_of(model: Path, **changes: object) -> dict[str, object]:
    """Settings of a small run; with `TWO` it has two micro-batches a step."""
    return {
        "model_path": str(model), "ppo_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1,
        "steps_per_generation": 1, "rollout_n": 2, "max_prompt_length": 16, "max_response_length": 48,
        "log_prob_micro_batch_size_per_gpu": 2, "ref_log_prob_micro_batch_size_per_gpu": 2,
        "update_weights_bucket_megabytes": 1, "tensor_model_parallel_size": 1, "gpu_memory_utilization": 0.1,
        "reference": True, "use_kl_loss": True, **changes,
    }  # fmt: skip


def simulated(model: Path, folder: Path, sharding: Sharding = "fsdp1", **changes: object) -> Peaks:
    values = values_of(model, **changes)
    worst_case = WorstCase(path=worst_case_path(folder))
    TRAINER.inspect(values, Inspection(device="sim:h100", worst_case=worst_case, ranks=2))
    task = Task(device="sim:h100", output=folder, worst_case=worst_case, steps=2)
    launch = Launch(ranks=2, sharding=sharding)
    with simulated_rank(launch, 0, device="sim:h100"), fake_gpu("h100", enforce_capacity=False) as gpu:
        report = Peaks(gpu)
        run = TRAINER.build(values, task)
        run.train(report)
        report.enter("end")
    return report


def test_phases_come_in_verls_order_and_their_bytes_grow_with_their_own_micro_batch(
    model: Path, tmp_path: Path
) -> None:
    small = simulated(model, tmp_path, **TWO)
    assert list(small.peaks) == [
        "update", "sync", "rollout", "old log-probs", "reference", "loading", "optimizer",
    ]  # fmt: skip
    large = simulated(model, tmp_path, ppo_micro_batch_size_per_gpu=4, gradient_accumulation_steps=1,
                      steps_per_generation=1)  # fmt: skip
    assert large.peaks["update"] > small.peaks["update"]
    assert large.peaks["old log-probs"] == small.peaks["old log-probs"]
    scores = simulated(model, tmp_path, **TWO, log_prob_micro_batch_size_per_gpu=4)
    assert scores.peaks["old log-probs"] > small.peaks["old log-probs"]
    assert scores.peaks["update"] == small.peaks["update"]


@pytest.mark.slow
def test_with_adapters_the_reference_is_the_actor_with_the_sizes_of_its_own_scores(model: Path, tmp_path: Path) -> None:
    """verl's `_compute_ref_log_prob` asks the actor's worker then; the reference's own sizes were simulated."""
    small, scores = (
        simulated(model, tmp_path, **TWO, lora_rank=8, log_prob_micro_batch_size_per_gpu=rows).peaks for rows in (2, 4)
    )
    grown = scores["old log-probs"] - small["old log-probs"]
    assert scores["reference"] - small["reference"] > grown / 2 > 0


@pytest.mark.slow
def test_responses_end_where_the_engine_cuts_them(model: Path, tmp_path: Path) -> None:
    """max_response_length beyond the model's context was simulated whole, and verl never makes it."""
    short = simulated(model, tmp_path, max_response_length=16)
    stated = simulated(model, tmp_path, max_response_length=4000, max_model_len=32)
    positions = simulated(model, tmp_path, max_response_length=4000, max_position_embeddings=32)
    assert stated.peaks == positions.peaks == short.peaks
    worst_case = WorstCase(path=worst_case_path(tmp_path))
    asked = Inspection(device="sim:h100", worst_case=worst_case, ranks=2)
    facts = TRAINER.inspect(values_of(model, max_response_length=4000, max_model_len=32), asked)
    assert facts.resolved["max_response_length"] == 16
    assert any("a response ends after 16 tokens, not after max_response_length 4,000" in note for note in facts.notes)
    with pytest.raises(ConfigError, match=r"leaves no token of rollout.max_model_len 16 to generate"):
        TRAINER.inspect(values_of(model, max_model_len=16), asked)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({f"{ROLLOUT}.max_model_len": 40000}, "above the model's max_position_embeddings 32,768; verl ends when"),
        ({"data.max_prompt_length": 32768}, "leaves no token of the model's max_position_embeddings 32,768"),
        ({f"{ROLLOUT}.max_num_batched_tokens": 128}, "128 must be at least rollout.max_num_seqs 256; vLLM ends"),
    ],
)
def test_lengths_that_the_rollouts_engine_does_not_take_are_named_before_a_start(
    changed: Mapping[str, object], message: str
) -> None:
    assert any(message in wrong for wrong in verl_rules.explain({**QWEN, **changed}).wrong)
    with pytest.raises(ConfigError, match=re.escape(message)):
        verl_recipe.recipe({**QWEN, **changed})


def test_explain_says_where_the_engine_cuts_a_response() -> None:
    longer = {**QWEN, "data.max_response_length": 40000}
    assert "after 32,256 tokens" in dict(verl_rules.explain(longer).lines)["responses"]
    wider = {**longer, "actor_rollout_ref.model.override_config.max_position_embeddings": 65536}
    assert "responses" not in dict(verl_rules.explain(wider).lines)
    packed = {**longer, f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.{BUDGET}": 32768}
    assert not verl_rules.explain(packed).wrong  # no sample is longer than the context


def test_fsdp2s_own_offloading_leaves_no_states_on_the_card_and_takes_the_place_of_verls(
    model: Path, tmp_path: Path
) -> None:
    plain = simulated(model, tmp_path, "fsdp2", reference=False, use_kl_loss=False)
    moved = simulated(model, tmp_path, "fsdp2", reference=False, use_kl_loss=False, offload_policy=True,
                      param_offload=True, optimizer_offload=True)  # fmt: skip
    states = 12 * _parameters(model) // 2
    for phase in ("rollout", "loading"):
        assert plain.held[phase] - moved.held[phase] == pytest.approx(states, rel=0.05)
    assert moved.peaks["optimizer"] < plain.peaks["optimizer"] - states


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_a_generation_is_promised_the_same_seconds_whatever_its_optimizer_steps(model: Path, tmp_path: Path) -> None:
    def promised(mini: int) -> dict[str, float | None]:
        path = tmp_path / f"{mini}.sh"
        values = {
            **QWEN, "actor_rollout_ref.model.path": model, "data.train_batch_size": 16, "data.max_prompt_length": 16,
            "data.max_response_length": 48, f"{ACTOR}.ppo_mini_batch_size": mini, f"{ROLLOUT}.n": 2,
            f"{ACTOR}.ppo_micro_batch_size_per_gpu": 2, f"{ACTOR}.use_kl_loss": False, f"{ROLLOUT}.max_model_len": 64,
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 2, f"{ROLLOUT}.tensor_model_parallel_size": 1,
            f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": 1, "trainer.n_gpus_per_node": 2,
        }  # fmt: skip
        path.write_text(script(values))
        log = VerlLog(steps=1, allocated_bytes=None, reserved_bytes=None, seconds={})
        return {row.name: row.promised for row in rows_of(log, estimated(path), 16 // mini)}

    once, twice = promised(16), promised(8)
    for name in ("timing_s/gen", "timing_s/old_log_prob", "timing_s/update_weights"):
        assert once[name] is not None
        assert twice[name] == pytest.approx(once[name], rel=0.02), name


def estimated(path: Path) -> ProbeResult:
    import autofit

    return autofit.estimate(path, gpu="2xh100", advice=False).result


@pytest.mark.parametrize("sharding", [pytest.param("fsdp1", marks=pytest.mark.thorough), "fsdp2"])
def test_offloaded_states_are_gone_while_vllm_works_and_back_for_the_update(
    sharding: Sharding, model: Path, tmp_path: Path
) -> None:
    plain = simulated(model, tmp_path, sharding)
    moved = simulated(model, tmp_path, sharding, param_offload=True, optimizer_offload=True)
    share = _parameters(model) // 2  # of each of two ranks
    freed = plain.held["rollout"] - moved.held["rollout"]
    assert freed == pytest.approx(12 * share, rel=0.05)  # float32 weights and both moments
    assert moved.peaks["update"] == pytest.approx(plain.peaks["update"], rel=0.02)


def test_sglang_holds_its_share_and_more_and_keeps_its_weights_where_they_have_adapters(
    model: Path, tmp_path: Path
) -> None:
    plain = {"reference": False, "use_kl_loss": False}
    one, other = (simulated(model, tmp_path, "fsdp2", **plain, rollout_name=name) for name in ("vllm", "sglang"))
    assert other.peaks["rollout"] - one.peaks["rollout"] > 1 << 29  # graphs and computing, which vLLM's share has
    assert other.peaks["update"] == one.peaks["update"]  # the training of FSDP does not know its engine
    one, other = (
        simulated(model, tmp_path, "fsdp2", **plain, lora_rank=4, rollout_name=name) for name in ("vllm", "sglang")
    )
    kept = other.held["rollout"] - one.held["rollout"]
    assert kept == pytest.approx(2 * _parameters(model), abs=1 << 20)


def test_a_model_with_kernels_of_the_hub_in_flash_attns_place_is_simulated_with_flash_attns(tmp_path: Path) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model(
        "gpt_oss", hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, vocab_size=256,
        layer_types=["sliding_attention", "full_attention"],
    ).save_pretrained(tmp_path / "model")  # fmt: skip
    found = simulated(tmp_path / "model", tmp_path, "fsdp1", reference=False, use_kl_loss=False)
    assert found.peaks["update"] > 0
    assert any("attention with sinks" in note for note in found.gpu.notes)


@pytest.mark.thorough  # CI has Ulysses' bytes against verl's own engine, below
@pytest.mark.parametrize("sharding", ["fsdp1", "fsdp2"])
def test_ranks_that_share_samples_hold_their_part_of_the_activations(
    sharding: Sharding, model: Path, tmp_path: Path
) -> None:
    sizes = {**TWO, "ppo_micro_batch_size_per_gpu": 16, "log_prob_micro_batch_size_per_gpu": 16}
    plain = simulated(model, tmp_path, sharding, **sizes)
    shared = simulated(model, tmp_path, sharding, **sizes, ulysses_sequence_parallel_size=2)
    for phase, before in (("update", "loading"), ("old log-probs", "rollout")):
        whole, part = (each.peaks[phase] - each.held[before] for each in (plain, shared))
        assert 0.45 * whole < part < 0.75 * whole  # weights, and the batch itself, are held by both
    assert shared.peaks["reference"] == pytest.approx(plain.peaks["reference"], rel=0.01)  # which does not share


def test_ranks_that_share_samples_divide_the_models_heads(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="8 must divide the 4 heads"):
        simulated(model, tmp_path, ulysses_sequence_parallel_size=8)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", [pytest.param("fsdp1", marks=pytest.mark.thorough), "fsdp2"])
def test_a_layered_weight_sync_gathers_the_adapters_alone(sharding: Sharding, tmp_path: Path) -> None:
    import bitsandbytes  # noqa: F401  # the first import logs an exception, and pytest keeps its frames, with a weight

    (tmp_path / "model").mkdir()
    large = tiny.write_model(tmp_path / "model", hidden=256, layers=6 if sharding == "fsdp1" else 2)
    changes = {"lora_rank": 4, "reference": False, "use_kl_loss": False}
    whole = simulated(large, tmp_path, sharding, **changes)
    layered = simulated(large, tmp_path, sharding, **changes, layered_summon=True, load_format="safetensors")
    more = whole.peaks["sync"] - layered.peaks["sync"]
    if sharding == "fsdp1":  # which gathers all weights at once, FSDP2 one tensor
        assert more > 4 * _parameters(large) * 2 // 3
    else:
        assert more == 0
    assert layered.peaks["update"] == pytest.approx(whole.peaks["update"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sync",
    [
        {},
        pytest.param({"layered_summon": True, "load_format": "safetensors"}, marks=pytest.mark.thorough),
        pytest.param({"lora_merge": True}, marks=pytest.mark.thorough),
    ],
)
def test_adapters_under_fsdp1_have_from_pairs_of_layers_the_bytes_and_seconds_of_all(
    sync: dict[str, object], tmp_path: Path, fork_server: ForkServer
) -> None:
    (tmp_path / "model").mkdir()
    path = tiny.write_model(tmp_path / "model", hidden=256, layers=8)
    worst_case = WorstCase(path=worst_case_path(tmp_path))
    values = values_of(path, lora_rank=4, param_offload=True, reference=False, use_kl_loss=False, **sync)
    TRAINER.inspect(values, Inspection(device="sim:h100", worst_case=worst_case, ranks=8))
    launch = Launch(ranks=8, sharding="fsdp1")
    request = ProbeRequest(
        folder=tmp_path / "probe", trainer="verl", values={**values, LAUNCH: launch.to_values()}, device="sim:h100",
        limit_bytes=None, worst_case=worst_case.path, server_socket=fork_server.socket_path, cwd=tmp_path,
        least_of_fits=False,
    )  # fmt: skip
    few = probed(request)
    log = request.log_path.read_text()
    assert "traced again in pairs of layers" in log
    assert "all layers" not in log
    every = probed_anew(tmp_path / "probe", tmp_path / "deep", "all layers", fork_server)
    assert few.phases == every.phases
    assert few.phase_s == pytest.approx(every.phase_s, rel=0.005)  # less the launches for Adam's counters


@pytest.mark.parametrize("sharding", ["fsdp1", pytest.param("fsdp2", marks=pytest.mark.thorough)])
def test_merged_adapters_are_sent_as_whole_weights_and_the_engine_has_none(sharding: Sharding, tmp_path: Path) -> None:
    """verl's model.lora.merge, which was read by nothing: adapters were sent and served."""
    (tmp_path / "model").mkdir()
    large = tiny.write_model(tmp_path / "model", hidden=256, layers=2)
    changes = {"lora_rank": 4, "reference": False, "use_kl_loss": False, "load_format": "safetensors"}
    served = simulated(large, tmp_path, sharding, **changes, layered_summon=True)
    merged = simulated(large, tmp_path, sharding, **changes, lora_merge=True)
    weights = 4 * _parameters(large)  # float32, which FSDP1 gathers to merge
    if sharding == "fsdp1":
        assert merged.peaks["sync"] > served.peaks["sync"] + 0.7 * weights
    assert merged.peaks["update"] == pytest.approx(served.peaks["update"], rel=1e-3)


def test_an_adapters_buffers_are_a_part_of_vllms_weights() -> None:
    """Qwen2.5-7B, rank 20: buffers of 32, two bytes each; a product's inputs and outputs beside them."""
    decoder = Decoder(hidden=3584, layers=28, heads=28, key_heads=4, head_dim=128, intermediate=18944, vocab=152064)
    attention = 3 * 3584 + (3584 + 2 * 512) + 3584 + 3584
    mlp = 2 * (3584 + 18944) + 18944 + 3584
    assert adapter_bytes(decoder, rank=20, ranks=1) == 2 * 32 * 28 * (attention + mlp)
    assert adapter_bytes(decoder, rank=0, ranks=1) == 0
    parts = 3 * 3584 + (3584 + 2 * 512) // 2 + 3584 // 2 + 3584, 2 * (3584 + 18944 // 2) + 18944 // 2 + 3584
    assert adapter_bytes(decoder, rank=32, ranks=2) == 2 * 32 * 28 * sum(parts)


@pytest.mark.parametrize("sharding", ["fsdp1", pytest.param("fsdp2", marks=pytest.mark.thorough)])
def test_a_critic_has_phases_and_states_of_its_own(sharding: Sharding, model: Path, tmp_path: Path) -> None:
    changes = {
        "critic": True, "critic_model_path": str(model), "critic_sharding": sharding, "reference": False,
        "use_kl_loss": False, "critic_forward_max_token_len_per_gpu": 128, "critic_max_token_len_per_gpu": 128,
    }  # fmt: skip
    held = simulated(model, tmp_path, sharding, **changes)
    assert list(held.peaks)[3:6] == ["old log-probs", "values", "update critic"]
    states = 12 * _parameters(model, critic=True) // 2  # float32 weights and both moments of each of two ranks
    moved = simulated(model, tmp_path, sharding, **changes, critic_param_offload=True, critic_optimizer_offload=True)
    assert held.held["rollout"] - moved.held["rollout"] == pytest.approx(states, rel=0.05)
    assert moved.peaks["update critic"] == pytest.approx(held.peaks["update critic"], rel=0.02)


@pytest.mark.parametrize(("sharding", "each"), [pytest.param("fsdp2", 4, marks=pytest.mark.thorough), ("fsdp1", 2)])
def test_gradients_that_are_not_reduced_between_micro_batches_are_whole_on_each_card(
    sharding: Sharding, each: int, model: Path, tmp_path: Path
) -> None:
    deferred = simulated(model, tmp_path, sharding, **TWO)
    reduced = simulated(model, tmp_path, sharding, **TWO, use_no_sync_for_gradient_accumulation=False)
    more = deferred.peaks["update"] - reduced.peaks["update"]
    sharded = 4 * _parameters(model) // 2  # what is held of them where they are reduced
    assert more == pytest.approx(each * _parameters(model) - sharded, rel=0.25, abs=1 << 17)


def test_a_bypass_takes_the_rollouts_log_probabilities_and_scores_nothing_again(model: Path, tmp_path: Path) -> None:
    bypassing = simulated(model, tmp_path, bypass_mode=True)
    assert "old log-probs" not in bypassing.peaks
    assert "reference" in bypassing.peaks
    said = {**QWEN, "algorithm.rollout_correction.bypass_mode": "true"}
    assert verl_recipe.recipe(said).values["bypass_mode"] is True


def _parameters(model: Path, *, critic: bool = False) -> int:
    from transformers import AutoModelForCausalLM

    made = AutoModelForCausalLM.from_pretrained(model)
    head = made.lm_head.weight.numel() if critic else 0
    return int(sum(p.numel() for p in made.parameters()) - head)


@pytest.mark.parametrize(
    "changes",
    [
        {
            "lora_rank": 4,
            "use_dynamic_bsz": True,
            "ppo_max_token_len_per_gpu": 160,
            "log_prob_max_token_len_per_gpu": 160,
        },
        pytest.param({"use_fused_kernels": True}, marks=pytest.mark.slow),
        pytest.param(
            {"calculate_entropy": True, "entropy_checkpointing": True, "entropy_from_logits_with_chunking": True},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"free_cache_engine": False, "enforce_eager": True, "reference": False, "use_kl_loss": False},
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_other_settings_of_verl_run_too(changes: dict[str, object], model: Path, tmp_path: Path) -> None:
    report = simulated(model, tmp_path, "fsdp1", **changes)
    assert ("reference" in report.peaks) == (changes.get("reference", True))
    assert report.peaks["update"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "title",
    ["fsdp1, plain", "fsdp2, LoRA", "fsdp1, critic, Ulysses 2",
     pytest.param("fsdp1, LoRA", marks=pytest.mark.thorough)],
)  # fmt: skip
def test_each_phase_has_the_bytes_that_verls_own_engine_had(title: str, tmp_path: Path) -> None:
    """verl's own figures were measured by the experiment, which needs a checkout of it."""
    from experiments.frontends import verl_bytes

    kept = json.loads(verl_bytes.KEPT.read_text())[title]
    model = verl_bytes.write_model(tmp_path / "model")
    found = verl_bytes.of_autofit(str(model), verl_bytes.CASES[title], tmp_path)
    for phase, told in kept.items():
        assert found[phase] == pytest.approx(told["verl"], rel=2e-3), phase


@pytest.mark.thorough  # 44 s; CI holds verl against verl's own figures, above, and FSDP2 against real ranks elsewhere
def test_a_simulated_rank_holds_the_bytes_of_a_real_one_under_fsdp2(
    model: Path, tmp_path: Path, fork_server: ForkServer
) -> None:
    """The same run on two gloo ranks of the CPU and on a simulated CPU: its logits, loss, FSDP2 and optimizer."""
    values = values_of(
        model, attn_implementation="sdpa", use_torch_compile=False, ppo_micro_batch_size_per_gpu=12,
        gradient_accumulation_steps=2, steps_per_generation=2, log_prob_micro_batch_size_per_gpu=4,
        ref_log_prob_micro_batch_size_per_gpu=4, max_response_length=112,
    )  # fmt: skip
    launch = Launch(ranks=2, sharding="fsdp2")
    source = Source(values={**values, LAUNCH: launch.to_values()}, name="verl", what="the recipe")
    recipe = prepare(source, trainer="verl", device="cpu", folder=tmp_path, server=fork_server)
    recipe = replace(recipe, folder=tmp_path)
    real = real_peaks(recipe, launch, tmp_path / "ranks", fork_server)
    for found in real:
        task = Task(device="cpu", output=tmp_path, worst_case=WorstCase(path=worst_case_path(tmp_path)), steps=2)
        with simulated_rank(launch, found.rank), fake_gpu("h100", mode="cpu", enforce_capacity=False) as gpu:
            report = Peaks(gpu)
            run = TRAINER.build(values, task)
            run.train(report)
            report.enter("end")
        print(f"rank {found.rank}: real {found.allocator_bytes}, simulated {gpu.peak_requested_bytes}")
        assert gpu.peak_requested_bytes == pytest.approx(found.allocator_bytes, rel=0.01)
        assert max(report.peaks, key=lambda phase: report.peaks[phase]) == "update"


def test_fused_kernels_are_refused_where_fsdp2_shards_the_head_by_itself(model: Path, tmp_path: Path) -> None:
    """The simulation ended as verl does: aten.mm.default got mixed torch.Tensor and DTensor."""
    inspection = Inspection(device="sim:h100", worst_case=WorstCase(path=worst_case_path(tmp_path)), ranks=2)
    launch = Launch(ranks=2, sharding="fsdp2").to_values()
    with pytest.raises(ConfigError, match="reads the shards of a head"):
        TRAINER.inspect({**values_of(model, use_fused_kernels=True), LAUNCH: launch}, inspection)
    assert "use_fused_kernels" in TRAINER.inspect({**values_of(model), LAUNCH: launch}, inspection).left_out
    assert not TRAINER.inspect({**values_of(model), LAUNCH: {**launch, "sharding": "fsdp1"}}, inspection).left_out
