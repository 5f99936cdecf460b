"""The `sim:` device: the probe worker on a simulated card."""

import contextlib
import json
from pathlib import Path

import command_line
import pytest
import tiny
from at_once import probed
from probed_anew import probed_anew

from autofit.cli import main
from autofit.errors import ConfigError
from autofit.fakegpu.specs import gpu_spec
from autofit.hardware.hardware import choose_device, choose_target
from autofit.probing.fork_server import ForkServer
from autofit.probing.prepare import prepare, worst_case_path
from autofit.probing.result import ProbeRequest, ProbeResult, ProbeStatus
from autofit.probing.simulated import SimMemory, layers_alike
from autofit.recipe.recipe import TrainerName


def probe(
    recipe_path: Path, folder: Path, server: ForkServer, *, limit_bytes: int | None, trainer: TrainerName = "grpo",
    least_of_fits: bool = True,
) -> ProbeResult:  # fmt: skip
    recipe = prepare(
        recipe_path, trainer=trainer, device="sim:a100-40gb", folder=recipe_path.parent / "i", server=server
    )
    request = ProbeRequest(
        folder=folder, trainer=trainer, values=recipe.values, device="sim:a100-40gb", limit_bytes=limit_bytes,
        worst_case=worst_case_path(recipe_path.parent / "i"), server_socket=server.socket_path,
        least_of_fits=least_of_fits,
    )  # fmt: skip
    return probed(request)


@pytest.mark.slow
def test_the_least_capacity_fits_and_a_byte_less_says_by_how_much_not(
    tiny_recipe: Path, tmp_path: Path, fork_server: ForkServer
) -> None:
    free = probe(tiny_recipe, tmp_path / "free", fork_server, limit_bytes=None)
    assert free.status is ProbeStatus.FIT, free.reason
    least, used = free.least_capacity_bytes, free.device_used_bytes
    assert least is not None
    assert used is not None
    assert least <= used
    assert {p.name for p in free.phases} == {"load", "rollout", "scoring", "update", "optimizer"}
    assert free.fidelity == "predicted"
    assert len(free.step_s) == 1
    assert free.rollout_s[0] + free.update_s[0] <= free.step_s[0] * 1.001
    for phase in free.phases:
        assert sum(free.categories[phase.name].values()) <= phase.peak_allocated_bytes * 1.001
    totals = [sum(parts) for parts in zip(*free.course["live"].values(), strict=True)]
    assert max(totals) * 2**20 == pytest.approx(free.peak_allocated_bytes, rel=0.01)  # in MiB with one digit
    assert {"rollout", "scoring", "update", "optimizer"} <= {name for name, _, _ in free.course["phases"]}
    assert sum(seconds for *_, seconds in free.course["phases"]) == pytest.approx(free.step_s[0], rel=0.01)
    fits = probe(tiny_recipe, tmp_path / "fits", fork_server, limit_bytes=least, least_of_fits=False)
    assert (fits.status, fits.peak_allocated_bytes) == (ProbeStatus.FIT, free.peak_allocated_bytes)
    assert fits.least_capacity_bytes is None
    limit_bytes = least - 32 * 2**20
    below = probe(tiny_recipe, tmp_path / "below", fork_server, limit_bytes=limit_bytes, least_of_fits=False)
    assert below.status is ProbeStatus.OOM
    assert below.least_capacity_bytes == least
    assert below.device_used_bytes is not None
    assert below.device_used_bytes > least - 32 * 2**20


@pytest.mark.slow
def test_where_gaps_decide_the_bytes_with_expandable_segments_are_those_of_a_run_that_has_them(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    recipe = tmp_path / "dpo.yaml"
    values = {"model_name_or_path": "HuggingFaceTB/SmolLM2-135M", "dataset_name": "trl-lib/ultrafeedback_binarized",
              "max_length": 1024, "per_device_train_batch_size": 2, "learning_rate": 1e-6}  # fmt: skip
    recipe.write_text(json.dumps(values))
    free = probe(recipe, tmp_path / "free", fork_server, limit_bytes=None, trainer="dpo")
    assert free.least_capacity_bytes is not None, free.reason
    assert free.growing_capacity_bytes is None  # far from the limit
    limit_bytes = free.least_capacity_bytes - 64 * 2**20
    below = probe(recipe, tmp_path / "below", fork_server, limit_bytes=limit_bytes, trainer="dpo")
    assert below.growing_capacity_bytes is not None
    assert below.growing_capacity_bytes < 0.99 * free.least_capacity_bytes
    recipe.write_text(json.dumps(values | {"env": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}))
    grown = probe(recipe, tmp_path / "grown", fork_server, limit_bytes=limit_bytes, trainer="dpo")
    assert grown.least_capacity_bytes == below.growing_capacity_bytes


@pytest.mark.parametrize(
    ("trainer", "changes", "models"),
    [*(pytest.param(*case, marks=pytest.mark.thorough) for case in [
        ("sft", {}, 1), ("dpo", {}, 1), ("dpo", {"use_peft": False}, 2)]),  # its reference: fakegpu/test_trainers.py
     *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        ("reward", {"load_in_4bit": True}, 1),
        ("dpo", {"use_peft": False, "precompute_ref_log_probs": True}, 1)])],
)  # fmt: skip
def test_the_other_trainers_run_on_a_simulated_card(
    tiny_recipe: Path, tmp_path: Path, fork_server: ForkServer, trainer: TrainerName, changes: dict[str, object],
    models: int,
) -> None:  # fmt: skip
    folder, sizes = (
        tiny_recipe.parent,
        {"hidden_size": 1024, "intermediate_size": 4096, "head_dim": 256, "vocab_size": 32000},
    )
    model = tiny.write_model(folder / "model")
    (model / "model.safetensors").unlink()  # a config is enough
    (model / "config.json").write_text(json.dumps({**json.loads((model / "config.json").read_text()), **sizes}))
    path = tiny.write_offline_recipe(trainer, folder, model, **{"dtype": "bfloat16", "bf16": True, **changes})
    result = probe(path, tmp_path / "p", fork_server, limit_bytes=None, trainer=trainer, least_of_fits=False)
    assert result.status is ProbeStatus.FIT, result.reason
    scoring = {"scoring"} if "precompute_ref_log_probs" in changes else set()
    assert {p.name for p in result.phases} == {"load", "update", "optimizer", *scoring}
    assert (result.rollout_s[0] > 0) == bool(scoring)
    assert result.rollout_s[0] + result.update_s[0] <= result.step_s[0] * 1.001
    if "use_peft" in changes:  # bf16 weights of the policy and of a reference that is in memory
        weights = result.categories["optimizer"]["weights"]
        one = 2 * (2 * 32000 * 1024 + 2 * (3 * 1024 * 4096 + 3 * 1024 * 1024))
        assert weights == pytest.approx(models * one, rel=0.02)


def test_a_deep_model_is_traced_with_few_layers_and_counted_with_all(
    tmp_path: Path, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = tiny.write_recipe(tmp_path, tiny.write_model(tmp_path / "model", layers=12))
    found = probe(recipe, tmp_path / "deep", fork_server, limit_bytes=None, least_of_fits=False)
    assert found.status is ProbeStatus.FIT, found.reason
    assert "traced again" not in (tmp_path / "deep" / "probe.log").read_text()
    layer = 4 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)  # q, o; k, v; gate, up, down, in fp32
    assert 12 * layer < found.categories["update"]["weights"] < 2 * 12 * layer
    assert set(found.shares) == {"update", "rollout"}
    assert found.shares["rollout"]["host"] > 0.8  # of a tiny model


@pytest.mark.parametrize("mode", ["colocate", pytest.param("server", marks=pytest.mark.thorough)])
def test_vllm_has_its_share_of_the_card_with_all_layers_and_wakes_up(
    tmp_path: Path, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.chdir(tmp_path)
    changes = {"use_vllm": True, "vllm_mode": mode, "vllm_gpu_memory_utilization": 0.3, "vllm_enable_sleep_mode": True}
    recipe = tiny.write_recipe(tmp_path, tiny.write_model(tmp_path / "model", layers=12), **changes)
    found = probe(recipe, tmp_path / "p", fork_server, limit_bytes=None, least_of_fits=False)
    assert found.status is ProbeStatus.FIT, found.reason
    assert "traced again" not in (tmp_path / "p" / "probe.log").read_text()
    held = {phase: categories.get("vLLM", 0) for phase, categories in found.categories.items()}
    if mode == "server":
        assert set(held.values()) == {0}
    else:
        share = 0.3 * gpu_spec("a100-40gb").capacity_bytes
        assert held["rollout"] == pytest.approx(share, rel=1e-3)
        assert 0 < held["update"] < share / 40  # CUDA graphs and what is not torch's, while it sleeps
        weights = held["wake-up"] - held["update"]
        assert 2 * 12 * 32 * (2 * 32 + 2 * 16 + 3 * 64) < weights < share / 100  # bfloat16, of all layers
    assert found.rollout_s[0] > 0
    assert set(found.shares) == {"update"}  # of an engine's law no part is known


@pytest.mark.usefixtures("warm")
def test_estimate_prints_the_keys_that_programs_read_and_a_picture(
    tiny_recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", "run.yaml", "--gpu", "A100 40GB", "--json", "--no-advice", "--plot", "p.png"]) == 0
    said = capsys.readouterr()
    assert "wrote p.png" in said.err
    found = json.loads(said.out.splitlines()[-1])
    assert set(found) == {
        "peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes", "least_capacity_bytes", "capacity_bytes",
        "fits", "phases", "rollout_s", "update_s", "step_s", "fidelity", "computed_in_s", "changes", "closest",
        "host_costs", "notes", "step_s_90", "tight", "most_used_bytes", "untried", "faster", "card",
        "advice_ended_by",
    }  # fmt: skip
    assert found["fits"]
    assert found["step_s_90"][0] < found["step_s"] < found["step_s_90"][1] < 10 * found["step_s"]
    assert {"name", "peak_allocated_bytes", "categories"} == set(found["phases"][0])
    assert (tiny_recipe.parent / "p.png").read_bytes().startswith(b"\x89PNG")
    assert main(["estimate", "run.yaml", "--gpu", "l4", "--target-vram", "240MB"]) == 1
    shown = capsys.readouterr().out
    assert "It does not fit: it needs" in shown
    assert "settings makes it fit; the closest change exceeds the limit by" in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    "rows",
    [pytest.param({}, marks=pytest.mark.thorough), {"steps_per_generation": 2, "num_generations": 2}],
    ids=["one row", "short rows"],
)
def test_micro_batches_of_one_sample_that_are_left_out_change_nothing(
    tmp_path: Path, fork_server: ForkServer, rows: dict[str, int]
) -> None:
    """Of 12 in one row, the one of the longest prompt has no padding; the others have a mask."""
    changes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 12, "bf16": True, **rows}
    path = tiny.write_recipe(tmp_path, tiny.write_model(tmp_path / "model"), **changes)
    with contextlib.chdir(tmp_path):
        few = probe(path, tmp_path / "few", fork_server, limit_bytes=None)
    whole = probed_anew(tmp_path / "few", tmp_path / "all", "all micro-batches", fork_server)
    assert (few.phases, few.categories, few.least_capacity_bytes) == (
        whole.phases, whole.categories, whole.least_capacity_bytes
    )  # fmt: skip
    assert few.step_s == pytest.approx(whole.step_s, rel=1e-9)
    assert "traced again" not in (tmp_path / "few" / "probe.log").read_text()


def test_a_phase_of_a_probe_begins_on_its_card_too_and_so_within_what_is_recorded() -> None:
    memory = SimMemory("sim:l4", None)
    with memory.card(pattern=None):
        memory.switch("load", "scoring")
        assert memory._gpu is not None
        assert memory._gpu.memory.phase_marks[-1][1] == "scoring"


SPACE = """trainer: grpo
knobs:
  per_device_train_batch_size: {tier: neutral, values: solved, memory: ascending}
  steps_per_generation: {tier: neutral, values: solved, memory: ascending}
  max_completion_length: {tier: recipe, values: [x0.5, x1], memory: ascending}
"""
_OF_GRPO = {"loss_type", "mask_truncated_completions", "top_entropy_quantile", "use_liger_kernel"}
_OTHERWISE: list[dict[str, object]] = [
    {"use_peft": False, "bf16": True},
    {"gradient_checkpointing": True, "load_in_4bit": True, "bf16": True},
    {"beta": 0.04, "use_peft": False, "fp16": True},
    {"beta": 0.04, "num_iterations": 2, "bf16": True},
    {"steps_per_generation": 8, "loss_type": "dr_grpo"},
    {"steps_per_generation": 1, "mask_truncated_completions": True, "top_entropy_quantile": 0.5},
    {"use_liger_kernel": True},
    {"eval_strategy": "steps", "eval_steps": 1},
    {"torch_empty_cache_steps": 2},
]


@pytest.mark.thorough  # CI has probes with all micro-batches traced above, and fakegpu/test_micro_batches.py
@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
@pytest.mark.parametrize("changes", [{"gradient_checkpointing": True}, *_OTHERWISE], ids=str)
def test_micro_batches_that_are_played_change_nothing(
    tmp_path: Path, fork_server: ForkServer, trainer: TrainerName, changes: dict[str, object]
) -> None:
    known = {k: v for k, v in changes.items() if trainer == "grpo" or k not in _OF_GRPO}
    path = tiny.write_recipe(
        tmp_path, tiny.write_model(tmp_path / "model"), **{"gradient_accumulation_steps": 4, **known}
    )
    with contextlib.chdir(tmp_path):
        played = probe(path, tmp_path / "few", fork_server, limit_bytes=None, trainer=trainer)
    traced = probed_anew(tmp_path / "few", tmp_path / "all", "played micro-batches", fork_server)
    assert (played.status, played.phases, played.categories, played.least_capacity_bytes) == (
        ProbeStatus.FIT, traced.phases, traced.categories, traced.least_capacity_bytes
    )  # fmt: skip
    assert played.step_s == pytest.approx(traced.step_s, rel=1e-9)
    assert played.update_s == pytest.approx(traced.update_s, rel=1e-9)


@pytest.mark.slow
def test_a_search_on_a_simulated_card_is_marked_predicted(tiny_recipe: Path) -> None:
    """Over a space of one structure: each further one is traced, as is each change outside of the tier."""
    (tiny_recipe.parent / "space.yaml").write_text(SPACE)
    asked = ["search", "run.yaml", "--gpu", "rtx4090", "--trials", "2", "--space", "space.yaml", "--json"]
    done = command_line.run(tiny_recipe.parent, *asked, "--set", "use_peft=false")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["fidelity"] == "predicted"
    assert found["counts"]["fit"] == 2
    assert found["confirmation"]["status"] == "predicted"
    around = {(row["knob"], row["direction"]): row for row in found["sensitivity"]}
    assert around["max_completion_length", "down"]["device_used_delta_bytes"] < 0
    assert all(row["fidelity"] in ("predicted", None) for row in around.values())
    probed = [row for row in around.values() if row["trial"] is not None]
    assert {row["trial"] for row in probed} <= {0, 1}
    assert found["outside"]
    assert all(row["tier"] != "neutral" and row["speedup"] > 1 for row in found["outside"])
    margin = found["margin"]
    assert margin["bytes_left"] > 0
    assert (margin["tokens"] > 0, margin["fidelity"]) == (True, "predicted")
    again = command_line.run(tiny_recipe.parent, "report", "--json")
    reported = json.loads(again.stdout.splitlines()[-1])
    assert [reported[k] for k in ("sensitivity", "margin", "outside")] == [
        found["sensitivity"],
        margin,
        found["outside"],
    ]


def test_a_card_is_named_or_refused() -> None:
    assert choose_device("auto", "A100-40GB") == "sim:a100-40gb"
    assert choose_target(None, "sim:a100-40gb") > 39 * 2**30
    for device, gpu, message in [
        ("auto", "a1000", "unknown GPU"),
        ("sim", None, "needs a name or a size"),
        ("cpu", "t4", "--gpu"),
    ]:
        with pytest.raises(ConfigError, match=message):
            choose_device(device, gpu)
    with pytest.raises(ConfigError, match="at most the card's memory"):
        choose_target(80 * 10**9, "sim:a100-40gb")


@pytest.mark.parametrize(
    ("values", "layers"),
    [
        ({}, 1),
        ({"activation_checkpointing_kwargs": {"every_n_layers": 3}}, 3),
        ({"gradient_checkpointing_kwargs": '{"every_n_layers": 2, "offload": true}'}, 2),
        ({"activation_checkpointing_kwargs": {"use_reentrant": False}}, 1),
    ],
)
def test_layers_are_alike_in_the_pattern_of_checkpointing(values: dict[str, object], layers: int) -> None:
    assert layers_alike(values) == layers
