"""The keys of a config of verl (verl_keys.yaml), and the nearest to one that it does not have. No torch here."""

from difflib import get_close_matches
from functools import cache
from importlib import resources

from autofit.frontends.verl_settings import KEYS
from autofit.recipe.yaml_file import parse_yaml

_ALIKE = 0.85
_LONGEST = "actor_rollout_ref"  # the part of most keys


def is_part(key: str) -> bool:
    """Whether a key is a dotted path below one of the parts of verl's config."""
    head, dot, _ = key.lstrip("+").partition(".")
    return bool(dot) and head in {section.partition(".")[0] for section in _sections()}


def whole(key: str) -> str:
    """`key` as hydra wants it, also where it has no actor_rollout_ref, which `explain` leaves out of its lines."""
    path, head = f"{_LONGEST}.{key}", key.partition(".")[0]
    below = any(f"{section}.".startswith(f"{_LONGEST}.{head}.") for section in _sections())
    return path if below and "." in key and not is_part(key) else key


def is_in_config(path: str) -> bool:
    """Whether hydra finds a path in verl's config, so that it may be overridden without a `+`."""
    section, _, name = path.rpartition(".")
    return path in _sections() or name in _sections().get(section, ())


def unknown(key: str) -> str | None:
    """What is wrong with a key that verl's config does not have; None of one that it has, or that is added with `+`."""
    read = {path for named in KEYS.values() for path in (named.path, named.like)}
    below_open = any(key.startswith(f"{section}.") for section, names in _sections().items() if not names)
    if key.startswith("+") or key in read or below_open or is_in_config(key):
        return None
    return f"verl has no key {key}, and hydra refuses it at the start" + (
        f"; write {near}" if (near := _near(key)) else ""
    )


def _near(key: str) -> str | None:
    """The key that was meant: like it in its section, of its name in another one, or like the whole path."""
    section, _, name = key.rpartition(".")
    if close := get_close_matches(name, _sections().get(section, ()), n=1, cutoff=_ALIKE):
        return f"{section}.{close[0]}"
    paths = [f"{section}.{name}" for section, names in _sections().items() for name in names if section]
    elsewhere = [path for path in paths if path.endswith(f".{name}")]
    found = get_close_matches(key, elsewhere, n=1, cutoff=0.0) or get_close_matches(key, paths, n=1, cutoff=_ALIKE)
    return found[0] if found else None


@cache
def _sections() -> dict[str, tuple[str, ...]]:
    """{section: its keys}; () of one below which any key may be added."""
    text = resources.files("autofit.frontends").joinpath("verl_keys.yaml").read_text(encoding="utf-8")
    sections = parse_yaml(text)
    assert isinstance(sections, dict)
    return {section: tuple(str(names).split()) for section, names in sections.items()}
