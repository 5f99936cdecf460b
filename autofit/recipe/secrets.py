"""Secrets of a recipe: all values of `env`, and tokens, passwords and keys by the name of their key or their look.

Where a recipe is kept or sent (the study, requests, answers, logs), a reference stands for each secret. What it stands
for is a file of its own that only the user can read, in a folder that only the user can enter. No torch here.
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
    r"^token$|(^|_)(hub|hf|api|access|auth|bearer|refresh|wandb|private|github|gitlab)_?(token|key)$"
    r"|passw|passphrase|secret|credential",
    re.IGNORECASE,
)
# By their issuers' prefixes, as a JWT or after Bearer; the user and password of a URL, whose password may have a slash.
_LOOKS = (
    r"\b(?:hf_|sk-|gh[opusr]_|github_pat_|glpat-|xox[abprs]-|AIza|npm_|pypi-)[A-Za-z0-9_-]{8,}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\beyJ[\w-]{5,}\.[\w-]+(?:\.[\w-]*)?|(?<=\bBearer )\S{8,}"
)
_IN_URL = r"(?<=://)[^/@\s:]*:[^@\s]+(?=@)"
_SECRET_VALUE = re.compile(rf"{_LOOKS}|(?<=://)[^/@\s]+(?=@)|{_IN_URL}")
_SECRET_TEXT = re.compile(rf"{_LOOKS}|{_IN_URL}")  # a user's name alone tells where
# As a path writes it (https:/me:word@host), or cut short before its @; host:8080 is none.
_BROKEN_URL = re.compile(r"(:/{1,2})[^/@\s:]*:(?:[^@\s]+(?=@)|(?!\d+[/.])[^@\s]+?(?=\.\.\.))")
# A name in the text of a YAML, JSON or shell file, and what may follow it: a separator and a value.
_NAME = re.compile(r"[\w.-]+")
_NAMED = re.compile(r"""["']?(?:[ \t]*[:=][ \t]*|(?:[ \t]|\\\n)+)("[^"\n]*"|'[^'\n]*'|[^\s"'#]+)""")
_NO_SECRET = ("null", "none", "true", "false", "yes", "no", "~", "|", ">")
_IN_CLEAR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # variables of `env` that search spaces vary
_KEPT = re.compile(_REFERENCE + r"[0-9a-f]{24}")


def masked(values: Mapping[str, object]) -> dict[str, object]:
    """`values` with `***` for secrets and all environment variables; other keys and values stay."""
    found = _replaced(values, lambda _: MASK)
    if isinstance(values.get("env"), Mapping):
        found["env"] = dict.fromkeys(values["env"], MASK)  # type: ignore[call-overload]
    return found


def without_secrets(text: str) -> str:
    """`text` for the eyes of others, with `***` for what looks like a secret, also after `password=` and the like."""
    named = re.sub(r"(?i)([\w-]*(?:passw|passphrase|secret|token|api_?key)[\w-]*=)[^\s&'\"]+", rf"\1{MASK}", text)
    return _BROKEN_URL.sub(rf"\1{MASK}", _SECRET_TEXT.sub(MASK, named))


def sealed(values: Mapping[str, object]) -> dict[str, object]:
    """`values` with a reference for each secret; the same secret has the same reference on this machine."""
    env = values.get("env")
    if not isinstance(env, Mapping):
        return _replaced(values, _kept)
    variables = {name: _variable(name, value) for name, value in env.items()}
    return {**_replaced({**values, "env": {}}, _kept), "env": variables}  # in the order of `values`


def _variable(name: str, value: object) -> object:
    """The value of a variable of `env`, sealed unless it is as short as a switch: empty, true, 4."""
    short = value is None or isinstance(value, bool) or (isinstance(value, int) and abs(value) < 10_000)
    return value if short or value == "" or name in _IN_CLEAR else _kept(str(value))


def sealed_text(text: str) -> str:
    """The text of a file with a reference for each secret in it, by its look or by the name before it."""
    parts, end = [], 0
    for name in _NAME.finditer(text):
        is_reference = name[0] == _REFERENCE.rstrip(":")
        if name.start() >= end and not is_reference and _SECRET_KEY.search(name[0].lstrip("-").rpartition(".")[2]):
            found = _NAMED.match(text, name.end())
            value = "" if found is None else found[1].strip("\"'").rstrip(",;&|)}]")
            if found is not None and value and value[0] not in "$\\" and value.lower() not in _NO_SECRET:
                start = text.index(value, found.start(1))
                parts += [text[end:start], _kept(value)]
                end = start + len(value)
    return _SECRET_VALUE.sub(_kept_unless_a_name, "".join((*parts, text[end:])))


def _kept_unless_a_name(found: re.Match[str]) -> str:
    """The reference of what looks like a secret; of a key's name, such as hf_hub_token, the name."""
    start, end = found.span()
    after = found.string[end : end + 4].lstrip("\"' \t")
    is_name = found.string[max(0, start - 2) : start] == "--" or after.startswith(("=", ":"))
    return found[0] if is_name else _kept(found[0])


def opened_text(text: str) -> str:
    """`text` with the secrets in place of their references. Raises ConfigError for a deleted one."""
    return _KEPT.sub(lambda found: _read(found[0]), text)


def opened(values: Mapping[str, object]) -> dict[str, object]:
    """`values` with the secrets in place of their references. Raises ConfigError for a deleted one."""
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
    return opened_text(value) if isinstance(value, str) else value


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
        raise cannot_write(folder, error) from error
    return reference


def _read(reference: str) -> str:
    try:
        return (_folder() / reference.removeprefix(_REFERENCE)).read_bytes().decode("utf-8", "surrogatepass")
    except OSError as error:
        raise ConfigError(
            "a token, a password or a variable of the recipe's env is no longer kept on this machine: give the recipe "
            "to `autofit search` again, or set the token in the environment (HF_TOKEN) and leave it out of the recipe"
        ) from error


def _folder() -> Path:
    """The folder of the secrets, which is made. Raises EnvironmentFault where others could read or change it."""
    folder = cache_folder() / "secrets"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise cannot_write(folder, error) from error
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or folder.is_symlink():
        raise EnvironmentFault(f"{folder} must be a folder of yours that only you can enter (chmod 700); it is not")
    return folder


def _salt(folder: Path) -> bytes:
    """Random bytes of this machine, so that a reference hides even a short secret."""
    path = folder / "salt"
    if not path.exists():
        _write(path, secrets.token_bytes(32), replaces=False)
    return path.read_bytes()


def _write(path: Path, content: bytes, *, replaces: bool = True) -> None:
    """Write a file that only the user can read, atomically; of several writers one wins."""
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


def into_environment(values: Mapping[str, object]) -> None:
    """Set the variables of a recipe's `env` in this process.

    Before anything uses the card: torch's allocator reads its settings once, and TRL sets these only when it parses.
    """
    env = values.get("env")
    if isinstance(env, Mapping):
        os.environ.update({str(key): str(value) for key, value in env.items()})
