"""Secrets of a recipe: tokens, passwords and keys, found by the name of their key or by their look. No torch here.

Where a recipe is kept or sent (the study, requests, answers, logs), a reference stands for each secret. What it stands
for is a file of its own that only the user can read, in a folder that only the user can enter.
"""

import hashlib
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from autofit.errors import ConfigError, EnvironmentFault
from autofit.files import cache_folder, cannot_write

MASK = "***"
_REFERENCE = "autofit-secret:"
_SECRET_KEY = re.compile(
    r"^token$|(^|_)(hub|hf|api|access|auth|bearer|refresh|wandb)_?(token|key)$|passw|secret|credential", re.IGNORECASE
)
_SECRET_VALUE = re.compile(r"\b(hf_|sk-|ghp_|glpat-)[A-Za-z0-9_-]{8,}|(?<=://)[^/@\s]+(?=@)")
_KEPT = re.compile(_REFERENCE + r"[0-9a-f]{24}")


def masked(values: Mapping[str, object]) -> dict[str, object]:
    """`values` with `***` for secrets and all environment variables; other keys and values stay."""
    found = _replaced(values, lambda _: MASK)
    if isinstance(values.get("env"), Mapping):
        found["env"] = dict.fromkeys(values["env"], MASK)  # type: ignore[call-overload]
    return found


def sealed(values: Mapping[str, object]) -> dict[str, object]:
    """`values` with a reference for each secret; the same secret has the same reference on this machine."""
    return _replaced(values, _kept)


def opened(values: Mapping[str, object]) -> dict[str, object]:
    """`values` with the secrets in place of their references. Raises ConfigError for one that is no longer kept."""
    return {key: _opened(value) for key, value in values.items()}


def _replaced(values: Mapping[str, object], replace: Callable[[str], str]) -> dict[str, object]:
    return {
        key: replace(str(value)) if _SECRET_KEY.search(str(key)) and _is_text(value) else _inside(value, replace)
        for key, value in values.items()
    }


def _is_text(value: object) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool) and bool(value)


def _inside(value: object, replace: Callable[[str], str]) -> object:
    if isinstance(value, Mapping):
        return _replaced(value, replace)
    if isinstance(value, list):
        return [_inside(entry, replace) for entry in value]
    return _SECRET_VALUE.sub(lambda found: replace(found[0]), value) if isinstance(value, str) else value


def _opened(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _opened(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_opened(entry) for entry in value]
    return _KEPT.sub(lambda found: _read(found[0]), value) if isinstance(value, str) else value


# -- the files --------------------------------------------------------------------------------------------------------


def _kept(secret: str) -> str:
    """The reference of `secret`, which is now kept."""
    if _KEPT.fullmatch(secret):
        return secret
    folder = _folder()
    try:
        salt = _salt(folder)
        reference = _REFERENCE + hashlib.sha256(salt + secret.encode("utf-8", "surrogatepass")).hexdigest()[:24]
        path = folder / reference.removeprefix(_REFERENCE)
        if not path.exists():
            _write(path, secret.encode("utf-8", "surrogatepass"))
    except OSError as error:
        raise EnvironmentFault(cannot_write(folder, error)) from error
    return reference


def _read(reference: str) -> str:
    try:
        return (_folder() / reference.removeprefix(_REFERENCE)).read_bytes().decode("utf-8", "surrogatepass")
    except OSError as error:
        raise ConfigError(
            "a token or password of the recipe is no longer kept on this machine: give the recipe to `autofit search` "
            "again, or set the token in the environment (HF_TOKEN) and leave it out of the recipe"
        ) from error


def _folder() -> Path:
    """The folder of the secrets, which is made. Raises EnvironmentFault where others could read or change it."""
    folder = cache_folder() / "secrets"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise EnvironmentFault(cannot_write(folder, error)) from error
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or folder.is_symlink():
        raise EnvironmentFault(f"{folder} must be a folder of yours that only you can enter (chmod 700); it is not")
    return folder


def _salt(folder: Path) -> bytes:
    """Random bytes of this machine, so that a reference tells nothing of a short secret."""
    path = folder / "salt"
    if not path.exists():
        _write(path, secrets.token_bytes(32), replaces=False)
    return path.read_bytes()


def _write(path: Path, content: bytes, *, replaces: bool = True) -> None:
    """Write a file that only the user can read, whole or not at all; of several writers one wins."""
    handle, temporary = tempfile.mkstemp(dir=path.parent)  # of mode 0600
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    if replaces:
        os.replace(temporary, path)
        return
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        Path(temporary).unlink()
