"""The vLLM server of a recipe: its command and its cards."""

from __future__ import annotations

import pytest

from autofit.errors import ConfigError
from autofit.recipe.keys import LAUNCH
from autofit.recipe.launch import Launch
from autofit.recipe.launching import RolloutServer, needs_server

RESOLVED = {"use_vllm": True, "vllm_mode": "server", "vllm_server_host": "0.0.0.0", "vllm_server_base_url": None}


def recipe(servers: int = 0, /, **changes: object) -> dict[str, object]:
    launch = {} if servers == 0 else {LAUNCH: Launch(server_ranks=servers).to_values()}
    return {"model_name_or_path": "org/model", "use_vllm": True, "vllm_mode": "server", **launch, **changes}


def test_the_command_takes_from_the_recipe_what_it_says_of_its_server() -> None:
    server = RolloutServer.of(
        recipe(4, vllm_tensor_parallel_size=2, vllm_gpu_memory_utilization=0.8, vllm_max_model_length=4096,
               model_revision="v2", trust_remote_code=True, vllm_model_impl="transformers", dtype="float32")
    )  # fmt: skip
    assert server.arguments("10.0.0.7", 4242) == [
        "--model=org/model", "--host=10.0.0.7", "--port=4242", "--tensor_parallel_size=2", "--data_parallel_size=2",
        "--revision=v2", "--gpu_memory_utilization=0.8", "--max_model_len=4096", "--vllm_model_impl=transformers",
        "--trust_remote_code=true",
    ]  # fmt: skip
    assert (server.cards, server.timeout_s) == (4, 1800)


def test_trl_s_own_command_takes_the_arguments() -> None:
    from trl.scripts.vllm_serve import build_command, make_parser

    asked = RolloutServer.of(recipe(2, model_revision="v2", trust_remote_code=True)).arguments("10.0.0.7", 4242)
    found, rest = make_parser().parse_args_and_config(asked, return_remaining_strings=True)
    assert rest == []
    command = build_command(found)
    assert command[command.index("--data-parallel-size") + 1] == "2"
    assert {"--trust-remote-code", "org/model", "10.0.0.7", "4242", "v2"} <= set(command)


def test_without_a_word_on_its_cards_a_server_has_those_of_one_copy() -> None:
    assert RolloutServer.of(recipe()).cards == 1
    assert RolloutServer.of(recipe(vllm_tensor_parallel_size=4)).cards == 4
    assert RolloutServer.of(recipe(vllm_server_timeout=90)).timeout_s == 90


def test_copies_must_divide_the_cards_of_the_server() -> None:
    with pytest.raises(ConfigError, match=r"vllm_tensor_parallel_size=2 must divide the 3 cards .*server_ranks"):
        RolloutServer.of(recipe(3, vllm_tensor_parallel_size=2))
    with pytest.raises(ConfigError, match="vllm_tensor_parallel_size must be a whole number from 1; got 0"):
        RolloutServer.of(recipe(vllm_tensor_parallel_size=0))


@pytest.mark.parametrize(
    ("values", "needs"),
    [
        ({}, True),
        ({"vllm_server_host": "localhost"}, True),
        ({"vllm_mode": "colocate"}, False),
        ({"use_vllm": False}, False),
        ({"vllm_server_host": "n9"}, False),
        ({"vllm_server_base_url": "http://n9:8000"}, False),
    ],
)
def test_a_server_that_the_recipe_finds_elsewhere_is_not_started(values: dict[str, object], needs: bool) -> None:
    assert needs_server(RESOLVED, recipe() | values) is needs
    assert not needs_server({"use_vllm": True, "vllm_mode": "colocate"}, {"use_vllm": True})  # TRL's default
