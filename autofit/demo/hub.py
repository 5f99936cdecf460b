"""Child process: fetch a model from the model hub into a folder, or fail quickly. Run with `python -m`."""

import argparse

_FILES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
_FILES += ["chat_template.jinja", "special_tokens_map.json", "vocab.json", "merges.txt"]


def main() -> None:
    """With `--ask`, only check whether the hub answers (exit status); else download."""
    parser = argparse.ArgumentParser()
    parser.add_argument("repo")
    parser.add_argument("--ask", action="store_true", help="only check whether the hub answers")
    parser.add_argument("--into", help="the folder to download into")
    arguments = parser.parse_args()

    from huggingface_hub import HfApi, snapshot_download

    if arguments.ask:
        HfApi().model_info(arguments.repo, timeout=3)
    else:
        snapshot_download(arguments.repo, local_dir=arguments.into, allow_patterns=_FILES)


if __name__ == "__main__":
    main()
