"""Whether the worst batch of a dataset has padding, and so an attention mask.

A probe trains on one longest sample, repeated. Where samples differ in length, real batches have padding, and with a
mask attention runs another kernel. With one (transformers, sdpa) the keys of grouped queries are repeated and the mask
is kept, so most runs take more memory; without one, float32 with grouped queries takes the math kernel, which keeps all
scores. The worst batch is the longest that the dataset can make; where both kinds can happen, the larger one counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

KEPT = 64  # lengths that are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLengths:
    """The lengths of a dataset's samples, in tokens. Of a pair of answers, `longest` has the shorter one."""

    longest: tuple[int, ...]  # of the `KEPT` longest samples, in descending order
    most: int
    least: int
    sequences: int = 1  # that a sample adds to a batch
    generates: bool = False  # whether a rollout is padded as a whole, over its micro-batches
    unmasked_is_larger: bool = False  # whether attention without a mask takes more memory
    filled: bool = False  # whether samples are cut from one stream, so that few are not of the longest length
    rest: int | None = None  # tokens of a batch's other sequences; None: as many, in the worst case

    @classmethod
    def of(cls, lengths: Sequence[int], *, most: int, others: bool = False, **more: Any) -> "SampleLengths":
        """Of the `lengths` of all samples, or with `others` of the longest: what was left out counts as shorter."""
        kept = tuple(sorted(lengths, reverse=True))
        return cls(longest=kept[:KEPT], most=most, least=0 if others else kept[-1], **more)

    def padded(self, micro_batch: int, limit: int | None) -> bool:
        """Whether the worst micro-batch, its samples cut to `limit` tokens, has padding.

        A rollout of prompts that differ has padding in each micro-batch but one of a single completion: TRL shuffles
        the completions, which end at different lengths too. Of samples that fill what they are cut from, the few
        micro-batches of an epoch that hold a shorter one do not count.
        """
        most = self.most if limit is None else min(self.most, limit)
        if min(self.least, most) == most:
            return False
        if micro_batch * self.sequences == 1:
            return self.generates and not self.unmasked_is_larger
        if self.generates or not (self.unmasked_is_larger or self.filled):
            return True
        same = sum(length >= most for length in self.longest)
        return same < min(micro_batch, KEPT)

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def is_padded(facts: Mapping[str, Any], micro_batch: int, limit: int | None) -> bool:
    """`Lengths.padded` of a worst case's facts; False where its trainer says nothing of lengths."""
    lengths = facts.get("lengths")
    if lengths is None:
        return False
    return SampleLengths(**{**lengths, "longest": tuple(lengths["longest"])}).padded(micro_batch, limit)
