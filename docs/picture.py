"""Draw the front of the built-in recipe as docs/img/split.svg and split.zh.svg: one effective batch, its splits.

    python docs/picture.py

Every figure is read from the output of `autofit report` in docs/commands.md.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
BATCH = 16  # completions of an optimizer step of the built-in recipe
WIDTH, TOP, ROW = 760, 78, 62
TEXTS: dict[str, dict[str, str | tuple[str, ...]]] = {
    "": {
        "title": "One optimizer step: 16 completions, however they are split",
        "split": "micro-batch x accumulation",
        "memory": "device-used",
        "step": "a step",
        "limit": "40 GB",
        "recipe": "the recipe",
        "winner": "the winner, ",
        "note": (
            "Predicted for GRPO with LoRA on Qwen3-4B, on a simulated A100 of 40 GB. All but the recipe run",
            "without activation checkpointing. The gradient of the winner is proven equal to the recipe's.",
        ),
    },
    ".zh": {
        "title": "一个优化步：无论怎样切分，都是 16 条 completion",
        "split": "micro-batch x 梯度累积",
        "memory": "显存占用",
        "step": "每步时间",
        "limit": "40 GB",
        "recipe": "原配置",
        "winner": "最优，",
        "note": (
            "预测值：GRPO，Qwen3-4B 的 LoRA，模拟的 A100 40 GB。除原配置外都关闭了 activation checkpointing。",
            "最优配置的梯度已证明与原配置相同。",
        ),
    },
}
STYLE = """
text { font: 14px system-ui, "Noto Sans SC", sans-serif; fill: #1f2933; }
.title { font-size: 17px; font-weight: 600; } .soft { fill: #64707d; font-size: 13px; }
.paper { fill: #ffffff; stroke: #d8dee4; } .rail { fill: #eef1f4; } .bar { fill: #8aa4c8; } .won { fill: #2f6fde; }
.limit { stroke: #c4314b; stroke-width: 2; } .strong { font-weight: 600; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6eaee; } .soft { fill: #9aa7b4; } .paper { fill: #161b22; stroke: #30363d; } .rail { fill: #222932; }
  .bar { fill: #58749c; } .won { fill: #5b93f5; } .limit { stroke: #ff6b81; }
}"""


@dataclass(frozen=True, slots=True)
class Trial:
    """A row of the front."""

    micro_batch: int
    used: str
    step: str
    speedup: str
    wins: bool

    @property
    def used_gb(self) -> float:
        return float(self.used.removesuffix(" GB"))


def trials(page: str) -> list[Trial]:
    """The recipe, then rows of the front that the page shows: those that are faster and split otherwise, by split."""
    shown = page[page.index("$ autofit report") : page.index("$ autofit studies")]
    found = []
    for part in re.split(r"^trial ", shown, flags=re.MULTILINE)[1:]:
        text = re.sub(r"\s+", " ", part)
        size = re.search(r"per_device_train_batch_size \d+ -> (\d+)", text)
        figures = re.search(r"device-used ([\d.]+ GB).*step ([\dm.]+ ?s).*speed-up ([\d.]+x)", text)
        if figures is None:  # the last row that the page shows, in part
            continue
        used, step, speedup = figures.groups()
        row = Trial(int(size[1]) if size else 8, used, step, speedup, " * " in text[:6])
        if "the recipe as it is" in text:
            recipe = row
        elif size and float(speedup.removesuffix("x")) > 1:
            found.append(row)
    return [recipe, *sorted(found, key=lambda trial: trial.micro_batch)]


def squares(trial: Trial, x: float, y: float) -> list[str]:
    """The completions of a step, a group of squares a micro-batch."""
    kind, side, drawn = "won" if trial.wins else "bar", 9, []
    for number in range(BATCH):
        gap = 6 * (number // trial.micro_batch)
        drawn.append(
            f'<rect class="{kind}" x="{x + number * (side + 1) + gap}" y="{y}" width="{side}" height="{side}" rx="2"/>'
        )
    return drawn


def row(trial: Trial, y: float, name: str) -> list[str]:
    """A trial: its name, its split, its memory against the limit, its step."""
    rail, left = 200, 400
    kind = "won" if trial.wins else "bar"
    return [
        f'<text x="24" y="{y + 14}" class="{"strong" if name else "soft"}">{name}</text>',
        *squares(trial, 24, y + 24),
        f'<text x="296" y="{y + 33}">{trial.micro_batch} x {BATCH // trial.micro_batch}</text>',
        f'<rect class="rail" x="{left}" y="{y + 20}" width="{rail}" height="16" rx="3"/>',
        f'<rect class="{kind}" x="{left}" y="{y + 20}" width="{rail * trial.used_gb / 40:.1f}" height="16" rx="3"/>',
        f'<text x="{left}" y="{y + 14}" class="soft">{trial.used}</text>',
        f'<line class="limit" x1="{left + rail}" x2="{left + rail}" y1="{y + 14}" y2="{y + 42}"/>',
        f'<text x="648" y="{y + 33}" class="{"strong" if trial.wins else ""}">{trial.step}</text>',
    ]


def picture(found: list[Trial], texts: Mapping[str, str | tuple[str, ...]]) -> str:
    """The whole picture."""
    height = TOP + ROW * len(found) + 58
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{texts["title"]}">',
        f"<style>{STYLE}</style>",
        f'<rect class="paper" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="10"/>',
        f'<text x="24" y="34" class="title">{texts["title"]}</text>',
        f'<text x="24" y="62" class="soft">{texts["split"]}</text>',
        f'<text x="400" y="62" class="soft">{texts["memory"]}</text>',
        f'<text x="600" y="62" class="soft" text-anchor="middle">{texts["limit"]}</text>',
        f'<text x="648" y="62" class="soft">{texts["step"]}</text>',
    ]
    for number, trial in enumerate(found):
        name = texts["recipe"] if number == 0 else f"{texts['winner']}{trial.speedup}" if trial.wins else ""
        lines += row(trial, TOP + ROW * number, str(name))
    for number, note in enumerate(texts["note"]):
        lines.append(f'<text x="24" y="{height - 38 + 20 * number}" class="soft">{note}</text>')
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    """Write the picture in each language."""
    found = trials((HERE / "commands.md").read_text(encoding="utf-8"))
    for name, texts in TEXTS.items():
        (HERE / "img" / f"split{name}.svg").write_text(picture(found, texts), encoding="utf-8")


if __name__ == "__main__":
    main()
