"""The vLLM server that a recipe trains beside (`vllm_mode: server`), as TRL's own command starts it. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from autofit.errors import ConfigError, option, quoted
from autofit.recipe.launch import Launch, is_on

COMMAND = ("trl", "vllm-serve")
_OWN_HOSTS = (None, "localhost", "127.0.0.1", "::1", "0.0.0.0")  # noqa: S104  # the last is TRL's default
_PATIENCE_S = 1800.0  # TRL's clients wait 240 s, in which a large model is not loaded from a network's file system
# Key of a recipe -> option of the command. Its dtype stays "auto", as in TRL's colocate mode and as predicted: weights
# that are trained in float32 are served in half precision.
_OPTIONS = {
    "model_revision": "revision", "vllm_gpu_memory_utilization": "gpu_memory_utilization",
    "vllm_max_model_length": "max_model_len", "vllm_model_impl": "vllm_model_impl",
}  # fmt: skip


def needs_server(resolved: Mapping[str, object], values: Mapping[str, object]) -> bool:
    """Whether the recipe `values`, with defaults `resolved`, generates with a vLLM server that it names no place of."""
    asked = {**resolved, **values}
    return (
        is_on(asked.get("use_vllm"))
        and asked.get("vllm_mode") == "server"
        and not asked.get("vllm_server_base_url")
        and asked.get("vllm_server_host") in _OWN_HOSTS
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutServer:
    """A vLLM server on `cards`: copies of the model, each on `tensor_parallel` cards, as predictions have them.

    It is to answer within `timeout_s` of its start.
    """

    model: str
    cards: int = 1
    tensor_parallel: int = 1
    options: tuple[str, ...] = ()
    timeout_s: float = _PATIENCE_S

    def __post_init__(self) -> None:
        if self.cards % self.tensor_parallel:
            raise ConfigError(
                f"vllm_tensor_parallel_size={self.tensor_parallel} must divide the {self.cards} cards of the vLLM "
                f"server; change it, or launch.server_ranks ({option('set')} launch.server_ranks=N)"
            )

    @classmethod
    def of(cls, values: Mapping[str, object]) -> "RolloutServer":
        """The server of the recipe `values`. Raises ConfigError."""
        parallel = _count(values, "vllm_tensor_parallel_size")
        options = [f"--{option}={values[key]}" for key, option in _OPTIONS.items() if values.get(key) is not None]
        if is_on(values.get("trust_remote_code")):
            options.append("--trust_remote_code=true")
        patience = values.get("vllm_server_timeout")
        return cls(
            model=str(values["model_name_or_path"]), cards=Launch.of(values).server_ranks or parallel,
            tensor_parallel=parallel, options=tuple(options),
            timeout_s=_PATIENCE_S if patience is None else float(cast(float, patience)),
        )  # fmt: skip

    def arguments(self, host: str, port: int) -> list[str]:
        """What follows COMMAND for a server that listens on `port` of `host`."""
        copies = self.cards // self.tensor_parallel
        return [
            f"--model={self.model}", f"--host={host}", f"--port={port}",
            f"--tensor_parallel_size={self.tensor_parallel}", f"--data_parallel_size={copies}", *self.options,
        ]  # fmt: skip


def _count(values: Mapping[str, object], key: str) -> int:
    value = values.get(key, 1)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key} must be a whole number from 1; got {quoted(value)}")
    return value
