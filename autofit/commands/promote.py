"""`autofit promote`: write a trial's YAML and follow its full run."""

import argparse
import json

from autofit.commands.common import DONE, INTERRUPTED, dir_option, say, terminate_like_interrupt
from autofit.errors import ConfigError


def promote(options: argparse.Namespace) -> int:
    from autofit.files import write_atomically
    from autofit.promotion.promotion import follow, launch, model_path, plan_promotion, stop
    from autofit.tuning.study import exclusive

    terminate_like_interrupt()
    promotion = plan_promotion(options.dir, study_name=options.study, trial=options.trial, say=say)
    if options.out is not None:
        write_atomically(options.out, promotion.yaml_path.read_text(encoding="utf-8"))
    say(f"wrote {options.out or promotion.yaml_path}")
    if options.write_only:
        return DONE
    if not promotion.trains_on_data:
        raise ConfigError(
            f"the recipe has no dataset to train on, as its prompts were made up; add dataset_name and your own "
            f"reward_funcs to {options.out or promotion.yaml_path} and run it with: trl {promotion.trainer} --config"
        )
    with exclusive(options.dir / "locks", promotion.folder.name):
        how = launch(promotion, study_folder=options.dir, restart=options.restart)
        say(f"trial {promotion.trial.number} of {promotion.study}: the run is {how}")
        try:
            final = follow(promotion, lambda line: say(_step_line(line)))
        except KeyboardInterrupt:
            say("saving a checkpoint after the step at work; run the same command again to resume")
            stop(promotion)
            return INTERRUPTED
    if options.json:
        print(json.dumps({"study": promotion.study, "trial": promotion.trial.number, **final}))
        return DONE
    print(f"{final['steps']} steps done, final loss {_number(final['final_loss'])}")
    if final["first_reward"] is not None:
        window = final["reward_window_steps"]
        print(f"mean reward {_number(final['first_reward'])} over the first {window} step(s), "
              f"{_number(final['last_reward'])} over the last {window}")  # fmt: skip
    print(f"the model is in {model_path(final)}; its run is in MLflow: autofit ui{dir_option(options.dir)}")
    return DONE


def _step_line(line: dict[str, object]) -> str:
    shown = {
        "reward": "reward", "kl": "kl", "loss": "loss", "completions/mean_length": "length",
        "completions/clipped_ratio": "clipped", "mean_token_accuracy": "token accuracy",
        "rewards/accuracies": "pair accuracy", "accuracy": "pair accuracy", "completions_per_s": "completions/s",
        "samples_per_s": "samples/s",
    }  # fmt: skip
    parts = [f"{name} {_number(line[key])}" for key, name in shown.items() if key in line]
    return f"step {line['step']}/{line['max_steps']}: {', '.join(parts)}"


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "-"
