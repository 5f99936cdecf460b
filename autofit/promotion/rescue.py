"""A run that was out of memory goes on: the next rung of its ladder that is proven neutral, as the job decides it.

What was taken is kept in rescues.json, so that a later start of the run goes on with it. No torch here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

from autofit.errors import AutofitError
from autofit.files import read_json, write_json
from autofit.plugin.protocol import UPDATE
from autofit.probing.oom import exited_for_oom
from autofit.probing.supervise import ProcessEnding
from autofit.promotion.checkpoints import checkpoints, step_of
from autofit.promotion.interruption import asked_to_end
from autofit.promotion.ladder import RescueLadder, RescueStep
from autofit.promotion.run_folder import Oom, RunFolder, forget_oom, log_of, read_oom
from autofit.promotion.tuned import Tuned
from autofit.proof.proof import Verdict, prove_changes
from autofit.recipe.recipe import Recipe
from autofit.space.traits import describe_changes
from autofit.watching.events import Kind, RunEvent, keep_event, read_progress

_FILE = "rescues.json"
_MOST_UNCHANGED = 5  # starts with the same settings, each of which got further than the one before
FILES = (_FILE, "rescued.yaml", "rescued.accelerate.yaml")


def goes_on(request_path: Path, ending: ProcessEnding) -> bool:
    """Whether the training is to start again: it was out of memory, and its request now has the next rung's values.

    Without a rung that is left, the reason is in failed.json.
    """
    request = read_json(request_path)
    assert request is not None
    folder = Path(str(request["folder"]))
    oom = read_oom(folder) or _killed(request, folder, ending)
    forget_oom(folder)
    if oom is None or asked_to_end(folder):
        return False
    ladder = RescueLadder.from_json(cast("Mapping[str, object]", request["ladder"]))
    refused: list[str] = []
    again = any(rescue["step"] == oom.finished + 1 for rescue in rescues(folder)[-1:])
    for rung in ladder.rungs(taken(folder), oom, again=again):
        said = _proven(ladder, rung, folder, str(request["cwd"]))
        if said is not None:
            _take(folder, ladder, rung, oom, said)
            write_json(request_path, {**request, **carried(folder, ladder)})
            return True
        refused.append(describe_changes(rung.compared, ladder.running(taken(folder)).resolved))
    if not again and len(_unchanged(folder)) < _MOST_UNCHANGED:
        _take(folder, ladder, RescueStep(changes={}), oom, "no neutral change that needs less memory is left")
        return True
    RunFolder(folder).fail(_nothing_left(ladder, oom, folder, refused))
    return False


def _unchanged(folder: Path) -> list[dict[str, object]]:
    """The rescues that changed nothing: a new process holds no fragments, and another one may have left the card."""
    return [rescue for rescue in rescues(folder) if not rescue["changes"]]


def taken(folder: Path) -> list[Mapping[str, object]]:
    """The changes of the rescues so far, in their order."""
    return [cast("Mapping[str, object]", rescue["changes"]) for rescue in rescues(folder)]


def rescues(folder: Path) -> list[dict[str, object]]:
    """The rescues of the run in `folder` so far, as JSON: changes, tier, step, resumed_from, text."""
    return cast("list[dict[str, object]]", (read_json(folder / _FILE) or {}).get("rescues", []))


def carried(folder: Path, ladder: RescueLadder) -> dict[str, object]:
    """What a request of the run must have after its rescues: the values that run now, and the rescues."""
    return {"values": dict(ladder.running(taken(folder)).values), "rescues": rescues(folder)}


def _killed(request: Mapping[str, object], folder: Path, ending: ProcessEnding) -> Oom | None:
    """The OOM of a training that could not tell it: killed by the kernel, or ended by a library that was out of
    memory."""
    if RunFolder(folder).is_over:
        return None
    if ending.kernel_oom:
        message = "the system ended the process, as the memory of the machine was full"
    elif ending.exit_code == 1 and exited_for_oom(log_of(folder)):
        message = "bitsandbytes ended the process"
    else:
        return None
    lines, saved = read_progress(folder), checkpoints(Path(str(request["output_dir"])))
    finished = int(str(lines[-1]["step"])) if lines else 0
    resumes_from = max((step for step in map(step_of, saved) if step <= finished), default=0)
    return Oom(message=message, phase=UPDATE, finished=finished, resumes_from=resumes_from)


def _proven(ladder: RescueLadder, rung: RescueStep, folder: Path, cwd: str) -> str | None:
    """What the gradient proof says of a rung that claims to be neutral; None if it is not neutral, or not provable."""
    if rung.tier != "neutral":
        return f"{rung.tier}, as allowed"
    recipe = ladder.running(taken(folder))
    try:
        proof = prove_changes(
            rung.compared, rung.changes, trial=ladder.trial, trainer=ladder.trainer, keys=ladder.keys,
            compared=ladder.compared, values=recipe.values, resolved=recipe.resolved, cwd=Path(cwd),
            traits=ladder.traits,
        )  # fmt: skip
    except AutofitError as error:
        print(f"not proven: {error}", flush=True)  # to the job's log
        return None
    return None if proof.verdict is Verdict.REFUSED else proof.sentence


def _take(folder: Path, ladder: RescueLadder, rung: RescueStep, oom: Oom, said: str) -> None:
    """Keep the rescue: rescues.json, rescued.yaml, and an event."""
    before = ladder.running(taken(folder))
    text = _in_words(before, rung, oom, said)
    entry = {
        "changes": dict(rung.changes), "tier": rung.tier, "step": oom.finished + 1, "resumed_from": oom.resumes_from,
        "proof": said, "text": text,
    }  # fmt: skip
    write_json(folder / _FILE, {"rescues": [*rescues(folder), entry]})
    said_so_far = "\n".join(str(rescue["text"]) for rescue in rescues(folder))
    running = ladder.running(taken(folder)).values
    Tuned(values=running, comment=f"autofit: {said_so_far}").write(folder / "rescued.yaml")
    keep_event(folder, RunEvent(step=oom.finished, kind=Kind.RESCUE, text=text, data=entry))


def _in_words(recipe: Recipe, rung: RescueStep, oom: Oom, said: str) -> str:
    start = f"goes on from step {oom.resumes_from}" if oom.resumes_from else "starts again from the beginning"
    again = f" ({oom.repeated} step(s) are trained again)" if oom.repeated else ""
    changes = describe_changes(rung.compared, recipe.resolved) if rung.changes else "the same settings"
    return (
        f"{oom.where}; the run {start}{again} with {changes}; the effective batch stays "
        f"{recipe.effective_batch_size}; {said}{_remarks(recipe, rung)}"
    )


def _remarks(recipe: Recipe, rung: RescueStep) -> str:
    """What is not the same under the rung, though its gradient is."""
    found = [rung.remark] if rung.remark else []
    if recipe.keys.accumulation in rung.changes and recipe.resolved.get("use_peft"):
        dropout = recipe.resolved.get("lora_dropout")
        found += [f"dropout (lora_dropout {dropout}) draws other masks for another micro-batch"] if dropout else []
    return "".join(f"; {remark}" for remark in found)


def _nothing_left(ladder: RescueLadder, oom: Oom, folder: Path, refused: list[str]) -> str:
    """Why the run ends, with what lower tiers could change."""
    so_far = [describe_changes({k: v for k, v in c.items() if v is not None}, {}) for c in taken(folder)]
    parts = [f"{oom.where}, and no {ladder.allow} change that needs less memory is left"]
    parts += [f"taken so far: {'; '.join(so_far)}"] if so_far else []
    parts += [f"not proven neutral: {'; '.join(refused)}"] if refused else []
    lower = list(_lower_tiers(ladder, oom, folder))
    parts += [f"with your leave: {'; '.join(lower)}"] if lower else ["promote a trial that uses less memory"]
    return ". ".join(parts)


def _lower_tiers(ladder: RescueLadder, oom: Oom, folder: Path) -> Iterator[str]:
    resolved = ladder.running(taken(folder)).resolved
    for rung in replace(ladder, allow="recipe").rungs(taken(folder), oom):
        if rung.tier != "neutral" and rung.tier != ladder.allow:
            yield f"{describe_changes(rung.compared, resolved)} (--allow {rung.tier})"
