"""ZeRO on a simulated card: TRL's own trainers with DeepSpeed's own engine, as accelerate starts them."""

import json
from pathlib import Path

import pytest
import tiny
from at_once import probed

from autofit.errors import ConfigError
from autofit.probing.fork_server import ForkServer
from autofit.probing.prepare import prepare, worst_case_path
from autofit.probing.result import ProbeRequest, ProbeResult, ProbeStatus
from autofit.recipe import launch as launches
from autofit.recipe.keys import LAUNCH
from autofit.recipe.launch import Launch
from autofit.recipe.recipe import TrainerName

DEVICE, RANKS = "sim:a100-80gb", 4
SIZES = {"hidden_size": 512, "intermediate_size": 2048, "head_dim": 128, "vocab_size": 8000}
PARAMETERS = 2 * 8000 * 512 + 2 * (3 * 512 * 2048 + 2 * 512 * 512 + 2 * 512 * 256)  # without the norms


def probe(
    folder: Path, server: ForkServer, launch: Launch, *, trainer: TrainerName = "sft", **changes: object
) -> ProbeResult:
    model = tiny.write_model(folder / "model")
    (model / "model.safetensors").unlink()
    (model / "config.json").write_text(json.dumps({**json.loads((model / "config.json").read_text()), **SIZES}))
    changes = {"dtype": "bfloat16", "bf16": True, "use_peft": False, **changes}
    write = tiny.write_recipe if trainer == "grpo" else lambda *a, **k: tiny.write_offline_recipe(trainer, *a, **k)
    path = write(folder, model, **changes)
    inspected = folder / "inspected"
    recipe = prepare(path, trainer=trainer, device=DEVICE, folder=inspected, server=server,
                     changes={LAUNCH: launch.to_values()})  # fmt: skip
    request = ProbeRequest(
        folder=folder / "probe", trainer=trainer, values=recipe.values, device=DEVICE, limit_bytes=None,
        worst_case=worst_case_path(inspected), server_socket=server.socket_path, least_of_fits=False,
    )  # fmt: skip
    result = probed(request)
    assert result.status is ProbeStatus.FIT, result.reason
    log = (folder / "probe" / "probe.log").read_text()
    assert "traced again" not in log
    return result


def test_zero_without_deepspeed_is_refused_before_anything_is_read(
    tmp_path: Path, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launches, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install deepspeed"):
        probe(tmp_path, fork_server, Launch(ranks=RANKS, sharding="zero2"))


class TestWithDeepSpeed:
    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

    @pytest.mark.parametrize(
        "launch",
        [
            Launch(ranks=RANKS, sharding="zero2"),
            pytest.param(Launch(ranks=RANKS, sharding="zero0"), marks=pytest.mark.slow),
            pytest.param(Launch(ranks=RANKS, sharding="zero1"), marks=pytest.mark.thorough),
            pytest.param(Launch(ranks=RANKS, sharding="zero2", offload="optimizer"), marks=pytest.mark.thorough),
            pytest.param(Launch(ranks=RANKS, sharding="zero3"), marks=pytest.mark.slow),
            pytest.param(Launch(ranks=RANKS, sharding="zero3", offload="parameters"), marks=pytest.mark.slow),
        ],
        ids=lambda launch: f"{launch.sharding}-{launch.offload}",
    )
    def test_full_training(self, tmp_path: Path, fork_server: ForkServer, launch: Launch) -> None:
        found = probe(tmp_path, fork_server, launch)
        phases = {phase.name: phase.peak_allocated_bytes for phase in found.phases}
        assert set(phases) == {"load", "update", "optimizer"}
        share = PARAMETERS // (RANKS if launch.sharding != "zero0" else 1)
        whole = 2 * PARAMETERS if launch.sharding != "zero3" else 2 * share
        state = 12 * share if launch.offload == "none" else 0
        least = state + (whole if launch.offload != "parameters" else 0)
        assert least < phases["optimizer"]
        assert found.host is not None
        assert found.host.load_bytes == pytest.approx(2 * PARAMETERS, rel=0.01)
        assert found.host.loading_ranks == (1 if launch.sharding == "zero3" else RANKS)
        assert found.host.told in found.notes
        kept = found.host.kept_bytes
        assert kept is not None
        if launch.offload == "none":  # stage 3 puts a rank's partition together on the host (zero/utils.py, defragment)
            assert kept < share if launch.sharding != "zero3" else kept == pytest.approx(2 * share, rel=0.01)
        else:  # float32 weights, moments and gradients; with the parameters in bfloat16 beside them
            assert 12 * share < kept < 24 * share

    @pytest.mark.slow
    @pytest.mark.parametrize("sharding", [pytest.param("zero2", marks=pytest.mark.thorough), "zero3"])
    def test_micro_batches_that_are_left_out_cost_what_those_before_did(
        self, tmp_path: Path, fork_server: ForkServer, sharding: launches.Sharding
    ) -> None:
        launch = Launch(ranks=RANKS, sharding=sharding)
        three, six, nine = (
            probe(tmp_path / str(each), fork_server, launch, gradient_accumulation_steps=each) for each in (3, 6, 9)
        )  # four or five of the last one's are left out
        assert nine.step_s[0] - six.step_s[0] == pytest.approx(six.step_s[0] - three.step_s[0], rel=1e-6)
        held = [one.peak_allocated_bytes or 0 for one in (three, six, nine)]  # with the samples of a whole step
        assert held[2] - held[1] == held[1] - held[0] > 0

    @pytest.mark.thorough  # CI has GRPO with LoRA under ZeRO-3 below, with vLLM
    @pytest.mark.parametrize("sharding", ["zero2", "zero3"])
    def test_grpo_with_lora(
        self, tmp_path: Path, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch, sharding: launches.Sharding
    ) -> None:
        monkeypatch.chdir(tmp_path)
        launch = Launch(ranks=RANKS, sharding=sharding)
        found = probe(tmp_path, fork_server, launch, trainer="grpo", use_peft=True)
        assert {phase.name for phase in found.phases} == {"load", "rollout", "scoring", "update", "optimizer"}

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("mode", "lora", "sharding"),
        [
            pytest.param("colocate", False, "zero3", marks=pytest.mark.thorough),
            ("colocate", True, "zero3"),
            ("server", False, "zero2"),
        ],
    )
    def test_weights_for_vllm_are_gathered_in_a_phase_of_their_own(
        self, tmp_path: Path, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch, mode: str, lora: bool,
        sharding: launches.Sharding,
    ) -> None:  # fmt: skip
        monkeypatch.chdir(tmp_path)
        vllm = {"use_vllm": True, "vllm_mode": mode, "vllm_gpu_memory_utilization": 0.3, "vllm_enable_sleep_mode": True}
        launch = Launch(ranks=RANKS, sharding=sharding)
        found = probe(tmp_path, fork_server, launch, trainer="grpo", use_peft=lora, **vllm)
        assert {phase.name for phase in found.phases} >= {"load", "sync", "rollout", "scoring", "update", "optimizer"}
        assert 0 < found.sync_s[0] < found.rollout_s[0]
        categories = found.categories.get("sync", {})  # nothing is gathered for a server where each rank has it all
        if mode == "colocate":  # the engine's whole copy, awake without its cache
            assert categories["vLLM"] > 2 * PARAMETERS
        if lora:  # merged at once: the whole model is gathered
            assert sum(n for name, n in categories.items() if name != "vLLM") > 2 * PARAMETERS
