"""What people add is one entry, and is found everywhere: a dummy of each is added here, and nothing else is changed."""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import lawful
import pytest
import torch
from recipes import grpo_recipe
from search_driver import plan

from autofit import fake_gpu, jobs
from autofit.api.arguments import cards_of
from autofit.cluster import slurm
from autofit.cluster.scheduler import Cluster, cluster_of, executor_of, read_executor
from autofit.commands.arguments import _Kinds
from autofit.errors import ConfigError
from autofit.fakegpu import specs
from autofit.fakegpu.kernels import KERNELS, Kernel
from autofit.fakegpu.rates.kernels import rates_name, stand_in
from autofit.fakegpu.scratch import SCRATCH, Scratch
from autofit.fakegpu.specs import _spec
from autofit.forecast.change import _others
from autofit.forecast.levers import Bounds, Known, Levers
from autofit.hardware.hardware import card_of, choose_device_and_target
from autofit.probing.cluster_launch import ClusterLauncher
from autofit.probing.launch import is_alive, place_in_slurm, start_job
from autofit.probing.result import ProbeStatus
from autofit.promotion.ladder import RescueLadder
from autofit.promotion.run_folder import Oom
from autofit.proof.proof import reach
from autofit.recipe.recipe import Recipe
from autofit.space.knob import load_space, read_space
from autofit.space.space import Space
from autofit.space.traits import SHARED_FILE, Reach, reason_for, shared_traits, traits_of
from autofit.tuning.record import StudyRecord
from autofit.tuning.search import Search, _asked, open_study
from autofit.tuning.study import load_study, trials_of

CORE = Path(__file__).parents[1] / "autofit"
SPACES = Path(__file__).parents[1] / "search_spaces"
KNOB = """
trainer: grpo
knobs:
  per_device_train_batch_size: {tier: neutral, values: solved, memory: ascending}
  spare_moments:
    tier: neutral
    values: [true]
    memory: any
    what: The moments of the optimizer lie elsewhere.
    less: any
    frees: [optimizer]
    place: 5
    speed: first
    proof: harmless
    why: it moves bytes
    restarts: true
    unless: {the optimizer has no moments: {optim: sgd}}
"""


def with_dummy(**changes: object) -> Recipe:
    return grpo_recipe(spare_moments=False, optim="adamw_torch", **changes)


@pytest.fixture
def space_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(KNOB)
    return path


def test_a_knob_of_one_entry_is_searched_and_says_why_it_is_left_out(space_file: Path) -> None:
    knobs = read_space(space_file, trainer="grpo")
    space = Space.of(with_dummy(), knobs)
    assert {c.values[1] for c in space.allowed()} == {True, False}
    left = Space.of(grpo_recipe(spare_moments=False, optim="sgd"), knobs)
    assert left.left_out == {"spare_moments": "the optimizer has no moments"}


def test_a_knob_of_one_entry_is_a_lever_of_the_estimate_in_its_place_and_with_its_bytes(space_file: Path) -> None:
    levers = Levers(Space.of(with_dummy(), read_space(space_file, trainer="grpo"), allow="recipe"))
    assert list(levers.strengths) == ["spare_moments", "micro-batch"]
    assert levers.strengths["spare_moments"] == (True,)
    assert _others(levers) == [{"spare_moments": True}]
    bounds = Bounds(levers.space.recipe, levers.own, levers.space.stated)
    known = Known({}, {"optimizer": {"weights": 10, "optimizer": 20}}, outside_bytes=1, context_bytes=1)
    assert bounds.least_bytes(known, {"spare_moments": True}) == 11


def test_a_knob_of_one_entry_is_kept_with_its_study_for_the_proof_and_the_page(space_file: Path) -> None:
    space = Space.of(with_dummy(), read_space(space_file, trainer="grpo"))
    record = _asked(replace(plan(space_file.parent, None, 10**9), space=space), StudyRecord())
    kept = StudyRecord.from_json(record.to_json()).traits
    assert reach((), "spare_moments", True, False, kept) == (Reach.HARMLESS, "it moves bytes")
    assert reach((), "spare_moments", True, False)[0] is Reach.OTHER
    assert reason_for("spare_moments", kept) == "The moments of the optimizer lie elsewhere."


@pytest.mark.parametrize("resumes_from", [0, 4])
def test_a_rescue_takes_a_knob_that_starts_anew_only_where_there_is_no_checkpoint(
    space_file: Path, resumes_from: int
) -> None:
    space_file.write_text(
        KNOB.replace("memory: any", "memory: ascending").replace("values: [true]", "values: [true, false]")
    )
    recipe = with_dummy()
    ladder = RescueLadder(
        trial=0, trainer="grpo", device="cpu", keys=recipe.keys, compared=(), values=recipe.values,
        resolved=recipe.resolved, space=str(space_file),
    )  # fmt: skip
    rungs = ladder.rungs([], Oom(message="", phase="update", finished=5, resumes_from=resumes_from))
    assert any("spare_moments" in rung.changes for rung in rungs) == (resumes_from == 0)


def test_every_knob_of_the_default_spaces_says_what_it_does_and_every_trait_is_of_a_key_that_is_used() -> None:
    used = set()
    for path in sorted(SPACES.glob("*.yaml")):
        if path.name != SHARED_FILE:
            for knob in load_space(str(path), trainer=path.stem):
                used.add(knob.name)
                assert knob.traits.what, f"{path.name}: {knob.name}"
    derived = {"gradient_accumulation_steps", "generation_batch_size", "use_liger_loss"}
    assert set(shared_traits()) - used == derived


@pytest.mark.parametrize(
    ("entry", "said"),
    [("less: lowest", "less must be any, lower or a list"), ("place: first", "place must be a whole number"),
     ("speed: fast", "speed must be one of first, early, none"), ("proof: yes", "proof must be one of compared"),
     ("restarts: 1", "restarts must be true or false"), ("unless: never", "unless must be a mapping of reasons"),
     ("frees: most", "frees must be all or a list")],
)  # fmt: skip
def test_a_trait_that_is_not_understood_is_named_with_its_knob(entry: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"trainer: grpo\nknobs:\n  optim: {{tier: neutral, values: [a], {entry}}}\n")
    with pytest.raises(ConfigError, match=f"knob optim: {said}"):
        read_space(path, trainer="grpo")


EXECUTOR = "executor: spare_cluster:CLUSTER\nprobes_per_job: 4\ntime: 10m\n"


def test_a_scheduler_in_one_file_runs_a_search_and_is_named_where_its_jobs_are(tmp_path: Path) -> None:
    (tmp_path / "executor.yaml").write_text(EXECUTOR)
    executor = read_executor(None, {}, tmp_path)
    assert executor.is_cluster
    there: Cluster = cluster_of(executor.kind)
    there.check_commands()
    launcher = ClusterLauncher(executor, tmp_path / "probes/law/jobs", function=lawful.run, idle_s=1)
    wanted = replace(plan(tmp_path, 3), parallel=2, sampler="grid")
    search = Search(wanted, open_study(wanted), server_socket=None, launcher=launcher)
    try:
        search.run()
        assert {job.where for job in jobs(tmp_path)} <= {executor.kind}
    finally:
        launcher.close()
    trials = trials_of(load_study(tmp_path, "law"))
    assert len(trials) == 3
    assert all(trial.status in (ProbeStatus.FIT, ProbeStatus.OOM) for trial in trials)


def test_a_full_run_in_a_scheduler_of_ones_own_is_found_again(tmp_path: Path) -> None:
    run = tmp_path / "promoted" / "law-trial-0"
    executor = executor_of({"kind": "spare_cluster:CLUSTER"})
    start_job(run, sleep_a_while, "", timeout_s=9, executor=executor)
    (run / "request.json").write_text('{"study": "law", "trial": 0}')
    assert is_alive(run)
    assert "runs on spare-1" in str(place_in_slurm(run))
    (found,) = jobs(tmp_path)
    assert (found.where, found.node, found.kind) == (executor.kind, "spare-1", "full run")
    found._end()
    assert not is_alive(run)


def sleep_a_while(_: str) -> None:
    time.sleep(20)


def test_the_command_line_takes_a_scheduler_of_ones_own_and_names_the_others_for_a_wrong_word() -> None:
    kinds = _Kinds(("local", "slurm"))
    assert "spare_cluster:CLUSTER" in kinds
    assert "slrum" not in kinds
    with pytest.raises(ConfigError, match="it lacks title, check_commands"):
        cluster_of("json:loads")
    with pytest.raises(ConfigError, match="must be importable, as module:object"):
        cluster_of("no_such_module:CLUSTER")


def test_slurm_is_a_module_with_the_functions_of_the_protocol() -> None:
    module: Cluster = slurm
    assert cluster_of("slurm") is module


PROFILE = """
place: 70
of_trl: true
page: true
generates: true
verl: true
keys: [spare_beta]
columns: [[question, verdict]]
dataset: org/verdicts
start: |
  model_name_or_path: MODEL
  dataset_name: DATASET
older: {logits_until: "1.15"}
"""
TRAINER = """
from pathlib import Path
from types import SimpleNamespace
from autofit.recipe.keys import BatchKeys
nothing = lambda *_, **__: None
TRAINER = SimpleNamespace(name="spare", keys=BatchKeys(), space=Path("spare.yaml"), inspect=nothing, build=nothing,
                          layers=nothing, small_trainings=nothing)
"""
# The profile is in the folder of the built-in ones, the module and the entry point are installed beside autofit.
LOOK = """
import json
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from unittest import mock
files = resources.files
folder = SimpleNamespace(iterdir=lambda: [*files("autofit.trainers").iterdir(), Path("spare.yaml")])
with mock.patch.object(resources, "files", lambda _: folder):
    import autofit.recipe.profile
from autofit.commands.arguments import parser
from autofit.frontends.trl_script import _KINDS
from autofit.plugin.registry import load, names, trainer_for
from autofit.recipe.as_of import bytes_a_logit
from autofit.recipe.profile import OF_TRL, recipe_text, trainer_of_data
from autofit.web.answering import _TRAINERS
Path("data.jsonl").write_text(json.dumps({"question": "?", "verdict": "!"}))
print(json.dumps({
    "installed": "spare" in names(), "loaded": load("spare").name, "told": trainer_for({"spare_beta": 1}, None),
    "starts": recipe_text("spare"), "of data": trainer_of_data("data.jsonl"), "of trl": "spare" in OF_TRL,
    "in scripts": "spare" in _KINDS, "on the page": "spare" in _TRAINERS,
    "as of": bytes_a_logit("spare", (1, 0), float32=True),
    "help": "spare" in parser().parse_args(["init", "spare"]).trainer,
}))
"""


def test_a_trainer_is_its_module_profile_space_and_entry_point_and_is_found_everywhere(tmp_path: Path) -> None:
    (tmp_path / "spare.py").write_text(TRAINER)
    (tmp_path / "spare.yaml").write_text(PROFILE)
    info = tmp_path / "spare-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: spare\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[autofit.trainers]\nspare = spare:TRAINER\n")
    done = subprocess.run(
        [sys.executable, "-c", LOOK], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("starts") == "model_name_or_path: Qwen/Qwen3-1.7B\ndataset_name: org/verdicts\n"
    assert found.pop("as of") == 12
    assert {found.pop(name) for name in ("loaded", "told", "of data")} == {"spare"}
    assert all(found.values()), found


def test_no_built_in_trainer_is_named_in_the_core() -> None:
    """Front ends name the trainers that other tools' files are; "reward" is what trainers log, too."""
    named = re.compile(r"""["'](grpo|sft|dpo|rloo|hf)["']|[!=]= ["']verl["']""")
    for path in sorted(CORE.rglob("*.py")):
        if "frontends" not in path.parts:
            assert not named.search(path.read_text(encoding="utf-8")), path


def test_a_card_of_one_entry_is_simulated_chosen_told_and_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    spare = _spec("spare-48gb", "NVIDIA Spare 48GB", capacity_mib=48000, context_mib=500, gb_per_s=1000,
                  tflops=(200, 100, 50), capability=(8, 9), sm_count=100)  # fmt: skip
    monkeypatch.setitem(specs.GPU_SPECS, spare.name, spare)
    for name in (spare.name, spare.full_name):
        monkeypatch.setitem(specs._BY_PLAIN_NAME, specs._plain(name), spare)
    assert choose_device_and_target("auto", "spare-48gb", None)[0] == "sim:spare-48gb"
    assert card_of("NVIDIA Spare 48GB") == (spare, "")
    assert spare in cards_of("all")
    assert rates_name(spare) == "l40s"
    assert "spare-48gb were not measured" in str(stand_in(spare))
    with fake_gpu("spare-48gb") as gpu:
        torch.ones(2**20, device="cuda" if gpu.mode == "cuda" else "cpu")
        assert gpu.peak_allocated_bytes == 4 * 2**20
        assert any("spare-48gb" in note for note in gpu.notes)


def test_a_kernel_of_one_entry_has_its_scratch_and_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    def cost() -> tuple[int, float]:
        with fake_gpu("a100-40gb", mode="cpu") as gpu:
            torch.ones(2**20).cummax(0)
        return gpu.peak_allocated_bytes, gpu.elapsed_s

    before = cost()
    monkeypatch.setitem(KERNELS, "aten::cummax", Kernel(reads=(50,)))
    monkeypatch.setitem(SCRATCH, "aten::cummax", Scratch(lambda *_, **__: (2**24,), on_cpu=True))
    after = cost()
    assert after[0] - before[0] >= 2**24 - 2**23
    assert after[1] > 2 * before[1]


def test_a_key_is_known_by_its_other_names() -> None:
    assert traits_of("load_in_4bit") == traits_of("quantization")
    assert traits_of("nothing of the kind").what == ""
