"""Batches at which verl's authors bisected their way to out of memory, beside the largest that live tensors allow.

Run: python experiments/verl_boundaries/run.py [NUMBER ...], the rows of rows.yaml by number from 1, all by default. It
keeps the rows that it does not run again. Writes results.json and table.md. `--replay NUMBER PROMPTS STEPS` runs so
many steps of a row through the simulated allocator with the card's capacity, each with lengths of its own, and keeps
whether they fit: what torch has cached in pieces that do not fit is of the allocator, and no estimate knows it. They
are traced from pairs of layers, expanded to the model's own depth, and replayed. With `longest` behind it the last of
these steps is the one with the longest micro-batch of all his 116.

The runs were of verl 0.4 (commit 49b08e95), whose worker differs from that of 0.9, which the trainer `verl` has. What
differs is played here as 0.4 has it, read in its source:

- logits are divided by the temperature in place, on a view (workers/actor/dp_actor.py, line 141);
- gradients are reduced after each micro-batch;
- vLLM works in the trainer's process, so there is one context on the card, and expandable segments are off, which
  vLLM's allocator refuses (vllm/device_allocator/cumem.py). Its cards have two communicators beside the trainer's: one
  that sums a tensor when it is made (vllm/distributed/device_communicators/pynccl.py), and torch's own of the same
  ranks, by which verl gathers the prompts (fsdp_vllm.py, preprocess_data). Both stay while vLLM sleeps.
- the tokens of a batch are not summed over the ranks with other samples, whose group has no buffers then.

Samples are packed at their true lengths, whose mean the author's logs of the same models on the same data say. The five
samples of a prompt are alike: ranks of 40 samples, eight prompts each, differ by 3,236 to 3,776 tokens in these logs
(global_seqlen/minmax_diff), 2.2 to 3.5 times what independent samples would. So a length is drawn for each prompt,
verl's trainer deals the samples to the cards by length, and a card's are cut into micro-batches in their own order
(_balance_batch in trainer/ppo/ray_trainer.py); the largest of a step's five counts.

Live bytes of the update are affine in the tokens and in the layers: four simulations of a row, of two sizes and two
depths, give the largest batch that a card holds beside one CUDA context and NCCL's buffers.
"""

import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import yaml

from autofit.fakegpu import fake_gpu
from autofit.fakegpu.depth.expand import Mark, expanded
from autofit.fakegpu.depth.stack import shallow_models
from autofit.fakegpu.rates.collectives import nccl_bytes
from autofit.fakegpu.replay import replay as replayed_log
from autofit.fakegpu.specs import gpu_spec
from autofit.frontends import verl_recipe
from autofit.frontends.verl import VerlSettings
from autofit.plugin.protocol import Inspection, Report, Task, WorstCase
from autofit.plugin.ranks import simulated_rank
from autofit.probing.prepare import worst_case_path
from autofit.recipe.catalogue import architecture
from autofit.recipe.launch import Launch
from autofit.trainers import verl as trainer
from autofit.trainers import verl_engine
from experiments.kept import commit

HERE = Path(__file__).parent
KINDS = ("replayed", "with the longest of his steps")
KEPT = HERE / "results.json"
GIB = 1 << 30
CARD = "h100"
RANKS, EACH, SAMPLES = 8, 40, 5  # of the logs: ranks, samples of each, and samples of a prompt
RANGE = 2.847  # standard deviations between the least and the most of eight normal draws
HIS_STEPS = 116
STEP = 12  # tokens of which a micro-batch is a multiple here; how it is cut into samples has no bytes
LAYERS = (2, 4)  # of the simulated models
_OF_VLLM = 2  # communicators over its cards
BYPASS = "algorithm.rollout_correction.bypass_mode"
A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


class Told(Report):
    """The most allocated and reserved bytes of each phase."""

    def __init__(self, memory: Any) -> None:
        self._memory, self._phase = memory, "load"
        self.peaks: dict[str, tuple[float, float]] = {}
        self.steps = 0  # begun

    def enter(self, phase: str) -> str:
        left, self._phase = self._phase, phase
        allocator = self._memory.allocator
        found = (allocator.peak_allocated_bytes / GIB, allocator.reserved_bytes / GIB)
        before = self.peaks.get(left, (0.0, 0.0))
        self.peaks[left] = round(max(before[0], found[0]), 2), round(max(before[1], found[1]), 2)
        allocator.peak_allocated_bytes = allocator.allocated_bytes
        return left

    def step_begins(self, step: int) -> None:
        self.steps += 1
        self.enter("begin")

    def gradient_is_whole(self, model: object, optimizer: object) -> None:
        self.enter("optimizer")

    def optimizer_ends(self) -> None:
        self.enter("end")


def values_of(row: Mapping[str, Any], prompts: int) -> dict[str, object]:
    """The keys of verl of a row's script with so many `prompts` a card."""
    cards, sharers = row["cards"], row["sharers"]
    samples = prompts * sharers  # of a micro-batch: ppo_micro_batch_size over the data-parallel ranks of 0.4
    return {
        "algorithm.adv_estimator": "grpo", "data.train_batch_size": prompts * cards,
        "data.max_prompt_length": STEP // 2, "data.max_response_length": STEP // 2,
        "actor_rollout_ref.model.path": row["model"], "actor_rollout_ref.model.lora_rank": 32,
        "actor_rollout_ref.model.lora_alpha": 32, f"{A}.ppo_mini_batch_size": prompts * cards,
        f"{A}.ppo_micro_batch_size_per_gpu": samples, f"{A}.use_kl_loss": True, f"{A}.entropy_coeff": 0.001,
        f"{A}.fsdp_config.param_offload": True, f"{A}.fsdp_config.optimizer_offload": True,
        f"{A}.fsdp_config.use_no_sync_for_gradient_accumulation": False,
        f"{A}.ulysses_sequence_parallel_size": sharers, f"{R}.log_prob_micro_batch_size_per_gpu": samples,
        f"{R}.tensor_model_parallel_size": cards, f"{R}.gpu_memory_utilization": row["utilization"], f"{R}.n": 5,
        f"{R}.max_num_seqs": 512, f"{R}.max_model_len": 1536, f"{R}.max_num_batched_tokens": 1536,
        f"{R}.load_format": "safetensors", f"{R}.layered_summon": True, f"{R}.enforce_eager": True,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": samples, "trainer.n_gpus_per_node": cards,
    }  # fmt: skip


def token_counts(row: Mapping[str, Any], prompts: int, step: int = 0) -> list[int]:
    """Tokens of each of a step's micro-batches on the first cards that share samples, with so many prompts a card."""
    drawn, cards, sharers = random.Random(step), row["cards"], row["sharers"]
    mean = row["prompt_mean"] + row["response_mean"]
    deviation = row["rank_range"] / RANGE / (EACH * SAMPLES) ** 0.5
    lengths = [length for _ in range(prompts * cards) for length in [drawn.gauss(mean, deviation)] * SAMPLES]
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    dealt: list[list[int]] = [[] for _ in range(cards)]
    for block in range(0, len(order), cards):
        turn = order[block : block + cards]
        for card, sample in enumerate(turn if block // cards % 2 == 0 else reversed(turn)):
            dealt[card].append(sample)
    own = [lengths[sample] for card in dealt[:sharers] for sample in sorted(card)]
    each = prompts * sharers
    return [round(sum(own[first : first + each])) for first in range(0, len(own), each)]


def divided_in_place(
    self: verl_engine.Engine, inputs: dict[str, torch.Tensor], labels: torch.Tensor, temperature: torch.Tensor, *,
    entropy: bool, training: bool,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """_forward_micro_batch of 0.4."""
    logits = self.module(**inputs, use_cache=False).logits.squeeze(0)
    logits.div_(1.0)
    told = {"log_probs": verl_engine.row_log_probs(logits, labels, inplace=training and not entropy)}
    if entropy:
        told["entropy"] = self._entropy(logits)
    return told


@contextmanager
def as_of_0_4(steps: Sequence[Sequence[int]]) -> Iterator[None]:
    """Context in which the worker is that of 0.4, and micro-batches of each step have so many rows of STEP tokens."""
    left = iter(steps)

    def in_the_process(law: Any, model: torch.nn.Module) -> Any:
        beside = _OF_VLLM * nccl_bytes(law.spec, law.ranks)
        return trainer.FakeEngine(trainer.active_gpu(), trainer.inner(model), law, process_bytes=beside)

    def split(self: VerlSettings, samples: int, **_: object) -> list[int]:
        return list(next(left))

    def each(sizes: list[int]) -> list[tuple[int, int, bool]]:
        return [(size, 1, number == len(sizes)) for number, size in enumerate(sizes, 1)]

    with (
        mock.patch.object(verl_engine.Engine, "_own_log_probs", divided_in_place),
        mock.patch.object(trainer, "_started", in_the_process), mock.patch.object(trainer, "marked_last", each),
        mock.patch.object(VerlSettings, "split", split), mock.patch.object(verl_engine.Engine, "count"),
    ):  # fmt: skip
        yield


def measured(row: Mapping[str, Any], steps: Sequence[list[int]], *, layers: int) -> dict[str, Any]:
    """GiB allocated and reserved of each phase of steps whose micro-batches have so many tokens, of few layers."""
    with tempfile.TemporaryDirectory() as name:
        path = shallow(row["model"], Path(name), layers)
        with running(row, steps, Path(name), model=path, expands=False) as (gpu, run):
            told = Told(gpu.memory)
            run.train(told)
            told.enter("end")
    return told.peaks


@contextmanager
def running(
    row: Mapping[str, Any], steps: Sequence[list[int]], folder: Path, *, model: str, expands: bool
) -> Iterator[tuple[Any, Any]]:
    """Context with a simulated card and a run of such steps on it."""
    counts, ranks, device = steps[0], row["cards"], f"sim:{CARD}"
    prompts = -(-sum(counts) // (len(counts) * STEP * row["sharers"]))
    values = values_of(row, prompts) | {"actor_rollout_ref.model.path": model}
    values |= {BYPASS: True, f"{A}.use_kl_loss": False}  # nothing of a generation is scored again: the update counts
    made = dict(verl_recipe.recipe(values).values)
    for key in ("launch", "env"):
        made.pop(key)
    worst_case = WorstCase(path=worst_case_path(folder))
    trainer.TRAINER.inspect(made, Inspection(device=device, worst_case=worst_case, ranks=ranks))
    task = Task(device=device, output=folder, worst_case=worst_case, steps=len(steps))
    with (
        as_of_0_4([[count // STEP for count in each] for each in steps]),
        simulated_rank(Launch(ranks=ranks, sharding="fsdp1"), 0, device=device),
        fake_gpu(CARD, enforce_capacity=False, follow_layers=expands, record_places=False) as gpu,
        shallow_models(pattern=2) if expands else nullcontext(),
    ):
        yield gpu, trainer.TRAINER.build(made, task)


class Begins(Report):
    """The marks at which steps begin."""

    def __init__(self, gpu: Any) -> None:
        self._gpu = gpu
        self.marks: list[Mark] = []

    def step_begins(self, step: int) -> None:
        self.mark()

    def mark(self) -> None:
        self.marks.append(Mark(name="", event=len(self._gpu.memory.log), stretch=self._gpu.clock.cut()))


def shallow(model: str, folder: Path, layers: int) -> str:
    """The folder of a config of the model with so many layers."""
    known = architecture(model)
    assert known is not None, model
    (folder / "config.json").write_text(json.dumps({**known.config, "num_hidden_layers": layers}))
    return str(folder)


def tokens(row: Mapping[str, Any], prompts: int) -> int:
    """Of the largest of a step's micro-batches, with so many prompts a card."""
    return max(token_counts(row, prompts))


def update_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Live bytes of the update with the batch that died, what 1,000 tokens more add, and what the card has for them."""
    known = architecture(row["model"])
    assert known is not None
    depth, (few, many) = int(str(known.config["num_hidden_layers"])), LAYERS
    spec = gpu_spec(CARD)
    beside = nccl_bytes(spec, row["cards"]) + nccl_bytes(spec, row["sharers"])  # vLLM's are among the live bytes
    limit = (spec.capacity_bytes - spec.context_bytes - beside) / GIB
    died = tokens(row, row["died"])
    whole = []
    for size in (died // 2, died):
        low, high = (measured(row, [[size, size]], layers=layers)["update"][0] for layers in LAYERS)
        whole.append(low + (high - low) / (many - few) * (depth - few))
    return {
        "live_gib_of_what_died": round(whole[1], 2),
        "gib_of_1000_tokens": round(1000 * (whole[1] - whole[0]) / (died - died // 2), 4), "limit_gib": round(limit, 2),
    }  # fmt: skip


def largest(row: Mapping[str, Any], found: Mapping[str, float], *, cached_gib: float = 0.0) -> int:
    """The most prompts a card whose live bytes fit beside so much that torch has cached."""
    died, each = tokens(row, row["died"]), found["gib_of_1000_tokens"] / 1000
    left = found["limit_gib"] - cached_gib - found["live_gib_of_what_died"]
    return max((prompts for prompts in range(1, 1000) if each * (tokens(row, prompts) - died) <= left), default=0)


def told(runs: Mapping[str, Any]) -> str:
    """`58 fits 3 steps, 68 dies in step 1`."""
    words = {prompts: f"{'fits' if run['fits'] else 'dies in'} {run['steps']}" for prompts, run in runs.items()}
    return ", ".join(f"{prompts} {words[prompts]}" for prompts in sorted(runs, key=int))


def table(rows: list[dict[str, Any]], kept: Mapping[str, Any]) -> str:
    """The rows as Markdown."""
    names = ("model", "H100", "ran", "died", *KINDS, "by live bytes", "off", "beside what logs have cached", "off",
             "live bytes of what died, GiB", "of, GiB", "cached in the log, GiB")  # fmt: skip
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    for row in rows:
        if (found := kept.get(row["name"])) is None:
            continue
        shown = []
        for cached in (0.0, row["cached_gib"]):
            most = largest(row, found, cached_gib=cached)
            shown += [most, f"{most / row['ran'] - 1:+.0%}"]
        runs = (told(found.get(kind, {})) for kind in KINDS)
        cells = (row["name"], row["cards"], row["ran"], row["died"], *runs, *shown,
                 found["live_gib_of_what_died"], found["limit_gib"], row["cached_gib"])  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def longest_step(row: Mapping[str, Any], prompts: int) -> int:
    """The step of his whole run with the longest micro-batch."""
    return max(range(HIS_STEPS), key=lambda step: max(token_counts(row, prompts, step)))


def replay(row: Mapping[str, Any], prompts: int, steps: Sequence[int]) -> dict[str, Any]:
    """Whether a row's steps of these numbers fit, at its own depth, with micro-batches as the draws make them."""
    began = time.monotonic()
    counts = [token_counts(row, prompts, step) for step in steps]
    with (
        tempfile.TemporaryDirectory() as name,
        running(row, counts, Path(name), model=row["model"], expands=True) as (gpu, run),
    ):
        begins = Begins(gpu)
        run.train(begins)
        begins.mark()
        deep = expanded(gpu, begins.marks)
        room = gpu.spec.capacity_bytes - gpu.outside_bytes
        found = replayed_log(deep.log, capacity_bytes=room, settings=gpu.settings)
    at = found.oom_event
    return {
        "fits": found.fits, "steps": len(steps) if at is None else sum(mark.event <= at for mark in deep.marks),
        "allocated_gib": round(found.peak_allocated_bytes / GIB, 2), "room_gib": round(room / GIB, 2),
        "reserved_gib": round(found.peak_reserved_bytes / GIB, 2), "emptied": found.retry_count,
        "computed_in_s": round(time.monotonic() - began), "commit": commit(),
    }  # fmt: skip


def main() -> None:
    rows = yaml.safe_load((HERE / "rows.yaml").read_text("utf-8"))["rows"]
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    if replays := sys.argv[1:2] == ["--replay"]:
        row, prompts, steps = rows[int(sys.argv[2]) - 1], int(sys.argv[3]), list(range(int(sys.argv[4])))
        longest = sys.argv[5:] == ["longest"]
        steps[-1] = longest_step(row, prompts) if longest else steps[-1]
        runs = kept.setdefault(row["name"], {}).setdefault(KINDS[longest], {})
        runs[str(prompts)] = replay(row, prompts, steps)
    for number in [] if replays else [int(word) for word in sys.argv[1:]] or range(1, len(rows) + 1):
        row = rows[number - 1]
        kept[row["name"]] = {**kept.get(row["name"], {}), **update_of(row), "commit": commit()}
        print(row["name"], kept[row["name"]], flush=True)
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    (HERE / "table.md").write_text(table(rows, kept))


if __name__ == "__main__":
    main()
