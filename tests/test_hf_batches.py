"""The batches of the plain transformers.Trainer: padding, packing, pairs and ratings."""

from pathlib import Path

import torch
from datasets import Dataset
from fakegpu.tiny_trainers import tokenizer
from hf_parsed import parsed

from autofit.trainers import hf_training
from autofit.trainers.hf_data import Blocks, Labelled, Pairs, Rated, SampleCollator, packed, tokenised

ROW = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}
LONGER = {"input_ids": [5] * 5, "labels": [5] * 5}


def test_a_batch_is_padded_on_the_right_to_a_multiple_and_padding_is_neither_read_nor_trained_on() -> None:
    batch = SampleCollator(padding=9, multiple=4)([ROW, LONGER])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 9, 9, 9, 9, 9], [5, 5, 5, 5, 5, 9, 9, 9]]
    assert batch["attention_mask"].sum(1).tolist() == [3, 5]
    assert batch["labels"][0].tolist() == [-100, 6, 7, *[-100] * 5]
    assert SampleCollator(padding=9, width=16)([ROW])["input_ids"].shape == (1, 16)


def test_a_pair_is_two_rows_of_one_width_the_chosen_answers_first() -> None:
    pair = {"chosen_ids": [1], "chosen_labels": [1], "rejected_ids": [2, 2], "rejected_labels": [2, 2]}
    assert Pairs(padding=0)([pair, pair])["input_ids"].tolist() == [[1, 0], [1, 0], [2, 2], [2, 2]]


def test_a_label_is_a_class_or_a_number() -> None:
    rows = [ROW | {"label": 2}, LONGER | {"label": 1}]
    assert Labelled(padding=0, classes=3)(rows)["labels"].tolist() == [2, 1]
    assert Labelled(padding=0, classes=1)(rows)["labels"].dtype is torch.float32
    tokens = Labelled(padding=0, classes=2, tokens=True)([{"input_ids": [5, 6, 7], "labels": [-100, 1, 0]}, LONGER])
    assert tokens["labels"].tolist() == [[-100, 1, 0, -100, -100], [1] * 5]


def test_packed_samples_do_not_see_each_other() -> None:
    row = {"input_ids": [5] * 5, "labels": [5] * 5, "seq_lengths": [2, 3]}
    common = {"padding": 9, "width": 6, "dtype": torch.float32}
    batch = Blocks(**common, flash=False)([row])
    seen = (batch["attention_mask"][0, 0] == 0).int().tolist()
    assert seen == [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0],
                    [0] * 6]  # fmt: skip
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2, 0]]
    flat = Blocks(**common, flash=True)([row, row])
    assert flat["input_ids"].shape == (1, 12)
    assert "attention_mask" not in flat
    assert flat["position_ids"][0, 6:].tolist() == [0, 1, 0, 1, 2, 0]


def test_a_packed_sample_has_the_logits_that_it_has_alone(small_model: Path, tmp_path: Path) -> None:
    model = hf_training.model_of(parsed(small_model, tmp_path))
    ids = list(range(5, 25))
    row = {"input_ids": ids, "labels": ids, "seq_lengths": [8, 12]}
    batch = Blocks(padding=0, width=24, flash=False, dtype=torch.float32)([row])
    del batch["labels"]
    with torch.no_grad():
        together = model(**batch).logits[0, 8:20]
        alone = model(input_ids=torch.tensor([ids[8:]])).logits[0]
    assert torch.allclose(together, alone, atol=1e-5)


def test_packing_fills_rows_with_whole_samples() -> None:
    sizes = [3, 7, 5, 2, 4, 6]
    rows = Dataset.from_list([{"input_ids": [size] * size, "labels": [size] * size} for size in sizes])
    found = packed(rows, 9)
    assert [row["seq_lengths"] for row in found] == [[7, 2], [6, 3], [5, 4]]
    assert found[0]["labels"] == [-100, *[7] * 6, -100, 2]


def test_a_rated_sample_stands_beside_the_answer_to_the_row_before_and_keeps_its_rating() -> None:
    rows = Dataset.from_dict({"prompt": ["w3 ", "w4 "], "completion": ["w5", "w6 w7"], "label": [False, True]})
    found = tokenised(rows, tokenizer(), objective="kto", max_length=9)
    assert [row["desirable"] for row in found] == [False, True]
    assert [row["rejected_labels"] for row in found] == [
        [-100] * (len(row["rejected_ids"]) - len(after)) + after
        for row, after in zip(found, [[t for t in found[n]["chosen_labels"] if t >= 0] for n in (1, 0)], strict=True)
    ]
    batch = Rated(padding=0)(list(found))
    assert batch["desirable"].tolist() == [False, True]
    assert batch["input_ids"].shape[0] == batch["other_input_ids"].shape[0] == 2
