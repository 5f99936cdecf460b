"""The columns that a script reads of its dataset, and a made-up row of them. Imports no torch."""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

SPLITS = ("train", "test", "validation")
_ANSWERS = ("chosen", "rejected")
_CHATS = ("messages", "conversations", "conversation", "chat", "dialog")
_TURN = {"role", "content", "from", "value"}  # of a chat: no columns
_OF_PIPELINES = {"generated_text", "summary_text", "translation_text"}  # what a pipeline gives
_NUMBERS = re.compile(r"labels?$|score|rating|num_|.*_(id|count)$|id$")
_OF_TOKENIZERS = {
    "input_ids", "attention_mask", "token_type_ids", "position_ids", "labels", "completion_mask",
}  # fmt: skip
_OF_REWARDS = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments"}
_COLUMN_METHODS = ("remove_columns", "rename_column", "select_columns", "cast_column")
_PROMPT = "prompt"
_REWARDS_OF_CHATS = r"""accuracy_reward|think_format_reward|\[0\]\[["']content["']\]"""  # they read turns
_WITH_ROLLOUTS = ("GRPO", "RLOO")
_BY_TRAINER = {  # what a trainer reads of rows that the script gives it as they are
    ("DPO", "ORPO", "CPO", "Reward", "SimPO"): ("prompt", *_ANSWERS), _WITH_ROLLOUTS: ("prompt",),
}  # fmt: skip


@dataclass(frozen=True)
class Columns:
    """The columns that the Python code of a script reads of its dataset, and `more` that it was seen to read."""

    code: str
    more: tuple[str, ...] = ()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Their names: those that it asks a row for, or that its rewards take, or else those of its trainer."""
        found = dict.fromkeys([*self._read(), *self._of_rewards()])
        if self._chats & set(found):
            found = dict.fromkeys(name for name in found if name not in _TURN)
        found |= dict.fromkeys(self.more)
        of_trainer = next((names for kinds, names in _BY_TRAINER.items() if any(
            f"{kind}Trainer" in self.code for kind in kinds)), None)  # fmt: skip
        if of_trainer is not None and not set(of_trainer) & set(found):
            found |= dict.fromkeys(of_trainer)
        return tuple(name for name in found if name not in {*SPLITS, *_OF_TOKENIZERS, *_OF_PIPELINES}) or ("text",)

    def row(self, tokens: int) -> dict[str, object]:
        """A row whose texts have `tokens` tokens in all, in words that every tokenizer has."""
        texts = [name for name in self.names if not _NUMBERS.match(name)]
        sides = [name for name in texts if name in _ANSWERS]
        parts = len(texts) - len(sides) // 2  # a pair has one answer or the other
        if any(f"{kind}Trainer" in self.code for kind in _WITH_ROLLOUTS):
            parts = 1  # the prompt is one column, and the others are for its rewards
        share = max(1, tokens // max(1, parts))
        return {name: self._value(name, share) if name in texts else 0 for name in self.names}

    def _value(self, name: str, tokens: int) -> object:
        if name not in self._chats:
            return " ".join(["a"] * tokens)
        if name == _PROMPT:
            return [{"role": "user", "content": " ".join(["a"] * tokens)}]
        half = " ".join(["a"] * max(1, tokens // 2))
        who, what = ("from", "value") if re.search(r"""["']from["']""", self.code) else ("role", "content")
        people = ("human", "gpt") if who == "from" else ("user", "assistant")
        return [{who: person, what: half} for person in people]

    @cached_property
    def _tree(self) -> ast.AST:
        return ast.parse(self.code)

    @cached_property
    def _chats(self) -> set[str]:
        """Names of columns that hold turns: the usual ones, and those of which a function takes one by its number."""
        found = set(_CHATS)
        if re.search(_REWARDS_OF_CHATS, self.code) and not re.search(r"""["']prompt["']\s*:""", self.code):
            found.add(_PROMPT)  # which the script takes as it stands in the data
        if not re.search(r"""["'](role|from)["']""", self.code):
            return found
        for function in ast.walk(self._tree):
            if isinstance(function, ast.FunctionDef | ast.Lambda):
                rows = {each.arg for each in function.args.args}
                found |= {name for node in ast.walk(function) for name in _turns(node, rows)}
        return found.union(_ANSWERS) if found & set(_ANSWERS) else found

    def _read(self) -> Iterator[str]:
        settings = {name for node in ast.walk(self._tree) for name in _dicts(node)}
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
                row = isinstance(node.value, ast.Name) and node.value.id not in settings
                yield from _words([node.slice]) if row or isinstance(node.value, ast.Subscript) else ()
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                of = node.func.value
                gets = node.func.attr == "get" and isinstance(of, ast.Name) and of.id not in settings
                yield from _words(node.args[:1]) if gets or node.func.attr in _COLUMN_METHODS else ()
            elif isinstance(node, ast.keyword) and node.arg in ("dataset_text_field", "text_column"):
                yield from _words([node.value])

    def _of_rewards(self) -> Iterator[str]:
        if "accuracy_reward" in self.code:  # TRL's own
            yield "solution"
        for node in ast.walk(self._tree):
            if isinstance(node, ast.FunctionDef) and any(each.arg == "completions" for each in node.args.args):
                yield from (each.arg for each in node.args.args if each.arg not in _OF_REWARDS)


def _dicts(node: ast.AST) -> Iterator[str]:
    """The names that a statement gives to a dict of its own or to a file of settings: no rows."""
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return
    value = node.value
    made = isinstance(value, ast.Call) and re.fullmatch(r"dict|vars|.*(asdict|safe_load)", ast.unparse(value.func))
    if isinstance(value, ast.Dict) or made:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def _turns(node: ast.AST, rows: set[str]) -> Iterator[str]:
    """The column X of `row["X"][0]` or `row["X"][:-1]`, of one of the `rows`."""
    if not (isinstance(node, ast.Subscript) and isinstance(node.value, ast.Subscript)) or _words_of(node.slice):
        return
    inner = node.value
    if isinstance(inner.value, ast.Name) and inner.value.id in rows:
        yield from _words_of(inner.slice)


def _words_of(node: ast.AST) -> list[str]:
    return list(_words([node]))


def _words(nodes: Sequence[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value
        elif isinstance(node, ast.List | ast.Tuple):
            yield from _words(node.elts)
