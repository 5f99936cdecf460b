"""`autofit ui` and `autofit sync`: the study's mirror in MLflow."""

import argparse

from autofit.commands.common import DONE, say, terminate_like_interrupt
from autofit.errors import ConfigError
from autofit.recipe.secrets import without_secrets


def ui(options: argparse.Namespace) -> int:
    from autofit.api.arguments import studies_folder
    from autofit.tracking.study_mirror import sync
    from autofit.tracking.ui import pages, server

    terminate_like_interrupt()
    folder = studies_folder(options.dir)
    if options.port is not None and not 0 < options.port < 65536:
        raise ConfigError(f"--port must be between 1 and 65535; got {options.port}")
    sync(folder, options.study)
    found = pages(folder, options.study)
    try:
        with server(folder, port=options.port) as mlflow:
            address = mlflow.address
            print(f"MLflow: {address}")
            print(f"all trials: {address}{found.table}")
            print(f"compare the front: {address}{found.compared}", flush=True)
            if found.summary is not None:
                print(f"the front as a picture: {address}{found.summary}", flush=True)
            say("Ctrl-C stops it")
            mlflow.wait()
    except KeyboardInterrupt:
        return DONE


def sync(options: argparse.Namespace) -> int:
    from autofit.api.arguments import studies_folder
    from autofit.tracking.database import tracking_uri
    from autofit.tracking.study_mirror import sync

    folder = studies_folder(options.dir)
    count = sync(folder, options.study, rebuild=options.rebuild)
    print(f"{count} finished trials are in MLflow ({without_secrets(tracking_uri(folder))})")
    return DONE
