"""One rank of several on a simulated card: TRL's own trainers under accelerate's settings, on a fake process group."""

import contextlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from at_once import probed
from probed_anew import probed_anew

from autofit.errors import ConfigError
from autofit.fakegpu import fake_gpu
from autofit.plugin.ranks import rank_environment, simulated_rank
from autofit.probing.fork_server import ForkServer
from autofit.probing.prepare import prepare, worst_case_path
from autofit.probing.result import ProbeRequest, ProbeResult, ProbeStatus
from autofit.recipe.keys import LAUNCH
from autofit.recipe.launch import Launch, Sharding
from autofit.recipe.recipe import TrainerName

DEVICE = "sim:a100-80gb"
SIZES = {"hidden_size": 512, "intermediate_size": 2048, "head_dim": 128, "vocab_size": 8000, "num_hidden_layers": 5}
PARAMETERS = 2 * 8000 * 512 + 5 * (3 * 512 * 2048 + 2 * 512 * 512 + 2 * 512 * 256)  # without the norms
MIB = 2**20


def probe(
    folder: Path, server: ForkServer, launch: Launch, *, trainer: TrainerName = "sft", **changes: object
) -> ProbeResult:
    folder.mkdir()
    model = tiny.write_model(folder / "model")
    (model / "model.safetensors").unlink()  # a config is enough
    sizes = {**SIZES, "num_hidden_layers": changes.pop("layers", SIZES["num_hidden_layers"])}
    (model / "config.json").write_text(json.dumps({**json.loads((model / "config.json").read_text()), **sizes}))
    changes = {"dtype": "bfloat16", "use_peft": False, **changes}
    write = tiny.write_recipe if trainer == "grpo" else lambda *a, **k: tiny.write_offline_recipe(trainer, *a, **k)
    path = write(folder, model, **changes)
    with contextlib.chdir(folder):  # where the reward functions are
        recipe = prepare(path, trainer=trainer, device=DEVICE, folder=folder / "i", server=server,
                         changes={LAUNCH: launch.to_values()})  # fmt: skip
    request = ProbeRequest(
        folder=folder / "probe", trainer=trainer, values=recipe.values, device=DEVICE, limit_bytes=None,
        worst_case=worst_case_path(folder / "i"), server_socket=server.socket_path, least_of_fits=False,
        cwd=folder,
    )  # fmt: skip
    result = probed(request)
    log = request.log_path.read_text()
    assert result.status is ProbeStatus.FIT, f"{result.reason}\n{log[-3000:]}"
    assert launch.sharding == "fsdp1" or "traced again" not in log, log[-3000:]
    return result


def with_all_layers(folder: Path, server: ForkServer) -> ProbeResult:
    """The result of the probe in `folder`, traced anew with all layers."""
    return probed_anew(folder / "probe", folder / "deep", "all layers", server)


def held(result: ProbeResult, phase: str, *names: str) -> float:
    """Bytes per parameter of some categories at the peak of a phase."""
    return sum(result.categories[phase].get(name, 0) for name in names) / PARAMETERS


def test_ddp_holds_the_whole_model_and_buckets_of_its_gradients_on_each_rank(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    result = probe(tmp_path / "ddp", fork_server, Launch(ranks=8))
    assert held(result, "optimizer", "weights") == pytest.approx(2, rel=0.01)
    assert held(result, "optimizer", "optimizer") == pytest.approx(4, rel=0.01)
    assert held(result, "optimizer", "gradients") == pytest.approx(4, rel=0.01)  # with the buckets
    everything = held(result, "optimizer", *result.categories["optimizer"])
    assert everything * PARAMETERS == pytest.approx(10 * PARAMETERS, abs=20 * MIB)  # with buckets, and workspaces
    assert [one.rank for one in result.ranks] == [0]  # all ranks are alike


@pytest.mark.parametrize(
    ("trainer", "changes"),
    [
        ("sft", {}), pytest.param("grpo", {}, marks=pytest.mark.thorough),
        pytest.param("dpo", {"use_peft": True}, marks=pytest.mark.thorough),
    ],
)  # fmt: skip
def test_fsdp2_holds_a_share_of_the_model(
    tmp_path: Path, fork_server: ForkServer, trainer: TrainerName, changes: dict[str, object]
) -> None:
    result = probe(tmp_path / "fsdp", fork_server, Launch(ranks=8, sharding="fsdp2"), trainer=trainer, **changes)
    most = 0.02 + (0.26 if not changes else 0.4)
    assert 0.25 <= held(result, "optimizer", "weights") <= most
    assert result.completions_per_step is not None


@pytest.mark.thorough  # CI has the bytes of real ranks with 4-bit weights (test_four_bit_ranks.py)
@pytest.mark.parametrize("sharding", ["fsdp2", "fsdp1"])
def test_4bit_weights_stored_as_bfloat16_are_shared_out_too(
    tmp_path: Path, fork_server: ForkServer, sharding: Sharding
) -> None:
    result = probe(
        tmp_path / "4bit", fork_server, Launch(ranks=2, sharding=sharding), use_peft=True, lora_r=4, bf16=True,
        lora_target_modules=["q_proj", "v_proj"], load_in_4bit=True, bnb_4bit_quant_storage="bfloat16",
    )  # fmt: skip
    embeddings = 2 * 8000 * 512
    weights = (2 * embeddings + (PARAMETERS - embeddings) / 2) / 2
    assert result.categories["optimizer"]["weights"] == pytest.approx(weights, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sharding", "trainer", "changes"),
    [
        ("fsdp2", "grpo", {"beta": 0.1, "gradient_checkpointing": True, "gradient_accumulation_steps": 1}),
        # TRL shards the reference model whole: its layers are gathered at once
        pytest.param("fsdp2", "dpo", {}, marks=pytest.mark.thorough),
        pytest.param("fsdp1", "grpo", {}, marks=pytest.mark.thorough),
        ("ddp", "sft", {"gradient_checkpointing": True}),  # buckets are made anew after the first step
        pytest.param("ddp", "sft", {"use_peft": True}, marks=pytest.mark.thorough),
    ],
    ids=["fsdp2-grpo-reference", "fsdp2-dpo-reference", "fsdp1-grpo", "ddp-sft", "ddp-sft-lora"],
)  # fmt: skip
def test_ranks_hold_to_the_byte_from_few_layers_what_they_hold_with_all(
    tmp_path: Path, fork_server: ForkServer, sharding: Sharding, trainer: TrainerName, changes: dict[str, object]
) -> None:
    few = probe(tmp_path / "run", fork_server, Launch(ranks=8, sharding=sharding), trainer=trainer, **changes)
    every = with_all_layers(tmp_path / "run", fork_server)
    assert few.phases == every.phases
    assert few.step_s[0] == pytest.approx(every.step_s[0], rel=0.005)
    assert_same_host(few, every)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sharding", "trainer", "changes"),
    [
        ("fsdp2", "sft", {"gradient_checkpointing": True}),
        *(pytest.param(sharding, trainer, changes, marks=pytest.mark.thorough) for sharding, trainer, changes in (
            ("ddp", "dpo", {"use_peft": True}), ("fsdp1", "grpo", {}), ("fsdp2", "grpo", {"beta": 0.1}),
        )),
    ],
)  # fmt: skip
def test_micro_batches_that_are_left_out_change_nothing_on_a_rank(
    tmp_path: Path, fork_server: ForkServer, sharding: Sharding, trainer: TrainerName, changes: dict[str, object]
) -> None:
    launch = Launch(ranks=4, sharding=sharding)
    few = probe(tmp_path / "run", fork_server, launch, trainer=trainer, gradient_accumulation_steps=6, **changes)
    whole = probed_anew(tmp_path / "run" / "probe", tmp_path / "run" / "all", "all micro-batches", fork_server)
    assert (few.phases, few.categories, few.host) == (whole.phases, whole.categories, whole.host)
    assert few.step_s == pytest.approx(whole.step_s, rel=1e-9)
    assert "all micro-batches" not in (tmp_path / "run" / "probe" / "probe.log").read_text()


@pytest.mark.thorough  # CI has it of verl's worker
def test_adapters_under_fsdp1_are_traced_in_pairs_of_layers(tmp_path: Path, fork_server: ForkServer) -> None:
    launch = Launch(ranks=8, sharding="fsdp1")
    few = probe(
        tmp_path / "run", fork_server, launch, layers=8, use_peft=True, bf16=True,
        lora_target_modules=["q_proj", "v_proj"],
    )  # fmt: skip
    log = (tmp_path / "run" / "probe" / "probe.log").read_text()
    assert "in pairs of layers" in log
    assert "all layers" not in log
    every = with_all_layers(tmp_path / "run", fork_server)
    assert few.phases == every.phases
    assert few.step_s[0] == pytest.approx(every.step_s[0], rel=0.005)


SCALARS = 4096  # bytes of single numbers on the host, some of which belong to no layer


def assert_same_host(few: ProbeResult, every: ProbeResult) -> None:
    """The host's memory that few layers stand for is that of all layers."""
    assert few.host is not None
    assert every.host is not None
    for name in ("load_bytes", "kept_bytes", "pinned_bytes", "save_bytes"):
        assert getattr(few.host, name) == pytest.approx(getattr(every.host, name), abs=SCALARS)


@pytest.mark.parametrize(
    ("trainer", "changes"),
    [pytest.param("sft", {}, marks=pytest.mark.slow),
     pytest.param("reward", {"use_peft": True}, marks=pytest.mark.thorough)],
)  # fmt: skip
def test_what_is_offloaded_is_counted_on_the_host(
    tmp_path: Path, fork_server: ForkServer, trainer: TrainerName, changes: dict[str, object]
) -> None:
    launch = Launch(ranks=4, sharding="fsdp2", offload="parameters")
    few = probe(tmp_path / "moved", fork_server, launch, trainer=trainer, **changes)
    assert few.host is not None
    if changes:
        every = with_all_layers(tmp_path / "moved", fork_server)
        assert few.phases == every.phases
        assert_same_host(few, every)
    else:  # bfloat16 shards of weights, gradients and two moments; the first two are pinned
        share = 2 * PARAMETERS // launch.ranks
        assert few.host.kept_bytes == pytest.approx(4 * share, rel=0.01)  # sizes are nearly powers of two
        assert few.host.pinned_bytes == pytest.approx(2 * share, rel=0.02)
        assert few.host.machine_bytes > 4 * share * launch.ranks


@pytest.mark.slow
def test_the_last_rank_is_simulated_where_ranks_do_not_divide_the_model(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    result = probe(tmp_path / "uneven", fork_server, Launch(ranks=3, sharding="fsdp2"), layers=2)
    assert [one.rank for one in result.ranks] == [0, 2]
    assert result.rank == 0
    assert result.ranks[1].peak_allocated_bytes <= result.ranks[0].peak_allocated_bytes


def test_the_network_of_a_launch_is_that_of_its_collectives() -> None:
    launch = Launch(ranks=16, machines=2, network_gbit=100)
    assert Launch.of({"launch": launch.to_values()}) == launch
    assert "network_gbit" not in Launch(ranks=16).to_values()  # studies without it keep their recipe's hash
    assert launch.words == "16 ranks on 2 machines with 100 Gbit/s each, DDP"
    for gbit in (0, True, 10**6, 1.5):
        with pytest.raises(ConfigError, match="network_gbit must be a whole number from 1 to 100000"):
            Launch.of({"launch": {"network_gbit": gbit}})
    with simulated_rank(launch), fake_gpu("h100") as gpu:
        assert "9.375 GB/s, 75% of all adapters of a machine (as given)" in gpu.clock.collectives.notes(16)[0]
    with simulated_rank(replace(launch, network_gbit=None)), fake_gpu("h100") as gpu:
        assert gpu.clock.collectives.network_gbit == 0


def test_a_simulated_rank_leaves_environment_and_process_group_as_they_were() -> None:
    import torch.distributed as distributed

    launch, before = Launch(ranks=4, sharding="fsdp2"), dict(os.environ)
    with simulated_rank(launch, 3):
        assert (distributed.get_rank(), distributed.get_world_size()) == (3, 4)
        assert os.environ["FSDP_VERSION"] == rank_environment(launch, rank=3, port=1, device=DEVICE)["FSDP_VERSION"]
    assert not distributed.is_initialized()
    assert dict(os.environ) == before
    with simulated_rank(Launch()):
        assert not distributed.is_initialized()
