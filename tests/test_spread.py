"""A recipe on other ranks keeps its effective batch and whole groups over all ranks, or is refused."""

import math
import random

import pytest

from autofit.errors import ConfigError
from autofit.recipe.keys import BatchKeys
from autofit.recipe.recipe import Batch

SAMPLES = BatchKeys()
ROLLOUTS = BatchKeys(rollout="steps_per_generation", group="num_generations")


def test_ten_thousand_recipes_on_random_ranks_are_exact_or_refused() -> None:
    draw = random.Random(0)
    exact = refused = 0
    for _ in range(10_000):
        generates = draw.random() < 0.7
        micro, accumulation, ranks = draw.randint(1, 48), draw.randint(1, 48), draw.choice([1, 1, 2, 3, 4, 6, 8, 16])
        factor = draw.choice([1, 1, 2, 3, accumulation])
        rollout = None if not generates else max(1, draw.choice([accumulation, accumulation * factor, 1]))
        old = Batch(micro=micro, accumulation=accumulation, rollout=rollout, ranks=ranks)
        group = draw.choice([k for k in range(1, 65) if old.effective % k == 0 and (old.generated or k) % k == 0])
        cards = draw.choice([1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64])
        whole = old.effective if old.generated is None else math.gcd(old.effective, old.generated)
        if whole % cards:
            with pytest.raises(ConfigError, match="numbers that work: ") as raised:
                old.on(cards, ROLLOUTS if generates else SAMPLES)
            assert len(str(raised.value)) <= 300
            for works in str(raised.value).rsplit("numbers that work: ")[1].split(","):
                assert old.on(int(works), ROLLOUTS).effective == old.effective
            refused += 1
            continue
        new = old.on(cards, ROLLOUTS if generates else SAMPLES)
        exact += 1
        assert (new.effective, new.generated, new.ranks) == (old.effective, old.generated, cards)
        assert 1 <= new.micro <= old.micro
        assert new.accumulation >= 1
        assert new.effective % group == 0
        if new.rollout is not None:
            generated = new.generated or 0
            assert new.rollout >= 1
            assert generated % group == 0
            assert generated % (new.micro * cards) == 0, "TRL: the generation batch is whole over all ranks"
            assert max(new.rollout, new.accumulation) % min(new.rollout, new.accumulation) == 0 or (
                max(old.rollout or 1, old.accumulation) % min(old.rollout or 1, old.accumulation)
            ), "rollouts straddle optimizer steps only where the recipe's do"
        larger = [m for m in range(new.micro + 1, old.micro + 1) if whole % (m * cards) == 0]
        assert not larger, "the largest micro-batch is taken"
    assert exact > 2000
    assert refused > 2000


def test_the_recipes_own_ranks_change_nothing() -> None:
    batch = Batch(micro=6, accumulation=4, rollout=8, ranks=2)
    assert batch.on(2, ROLLOUTS) == batch


def test_a_batch_that_cannot_be_divided_names_the_numbers_that_work() -> None:
    with pytest.raises(ConfigError, match=r"effective batch 12 .* by 8 ranks; numbers that work: 1, 2, 3, 4, 6, 12"):
        Batch(micro=4, accumulation=3, rollout=None, ranks=1).on(8, SAMPLES)
