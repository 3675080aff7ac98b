"""Conversations → text, by the tokenizer's own chat template, with the places of the assistant turns.

The places are found whatever the template: the conversation is rendered once as it is, and once with marks around
each assistant's content. Where the marked rendering without its marks is not the plain one, the row is a fault.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from dex.data.files import Fault
from dex.errors import DexError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPEN, CLOSE = "\ue000", "\ue001"  # private use: no text has them but one that means something else by them
MARKS = re.compile(f"[{OPEN}{CLOSE}]")
ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool", "function")},
    # ShareGPT's
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
# Llama 3's templates put today's date into the system turn, and tomorrow's blocks would be others.
FIXED = {"date_string": "26 Jul 2024"}

Turn = dict[str, Any]


class Span(NamedTuple):
    """An assistant turn: its content is text[start:end], and what ends the turn begins at `stop`."""

    start: int
    end: int
    stop: int


class Rendered(NamedTuple):
    text: str
    spans: tuple[Span, ...]


class ChatTemplate:
    """Renders conversations with the chat template of a tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, source: str) -> None:
        """Raises DexError, naming `source`, if the tokenizer cannot be used for chat data."""
        if tokenizer is None:
            raise ValueError("chat data is rendered with a tokenizer")
        chat_template(tokenizer, source)
        if not tokenizer.is_fast:
            raise DexError(
                f"{source} is chat data, which needs a tokenizer that says where its tokens lie, and this one does "
                "not; use a model with a tokenizer.json."
            )
        self.tokenizer = tokenizer

    def render(self, value: object) -> Rendered | Fault:
        """The text of a conversation and its assistant turns (at least one), or why it cannot be used."""
        turns = _turns(value)
        if isinstance(turns, Fault):
            return turns
        try:
            plain, marked = self._apply(turns), self._apply([_marked(turn) for turn in turns])
        except Exception as error:  # a template is a program; it may refuse a conversation, or fail at it
            return Fault("the chat template refuses it", " ".join(str(error).split()) or type(error).__name__)
        if MARKS.sub("", marked) != plain:
            return Fault("the chat template changes an assistant turn")
        if not plain.strip():
            return Fault("empty")
        return _rendered(plain, marked, [turn for turn in turns if _is_marked(turn)])

    def _apply(self, turns: list[Turn]) -> str:
        text = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=False, **FIXED)
        return str(text)


def user_turn(tokenizer: PreTrainedTokenizerBase, content: str) -> str:
    """What a chat model is given for it to answer: one turn of the user. Raises DexError where the template fails.

    Templates that can think are told not to: short answers would end before they begin.
    """
    turns = [{"role": "user", "content": content}]
    options = {"add_generation_prompt": True, "enable_thinking": False, **FIXED}
    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, **options))
    except Exception as error:  # a template is a program
        why = " ".join(str(error).split()) or type(error).__name__
        raise DexError(f"The tokenizer's chat template fails at a user turn ({why}); ask without it.") from error


def chat_template(tokenizer: PreTrainedTokenizerBase, source: str) -> str:
    """The template that conversations are rendered with. Raises DexError if there is none."""
    try:
        return str(tokenizer.get_chat_template())
    except ValueError as error:
        raise DexError(
            f"{source} is chat data, and the tokenizer has no chat template; set model.chat_template in the recipe "
            "to a .jinja file."
        ) from error


def clean(text: str) -> str | Fault:
    """A text with \\n line ends and no byte-order mark; a fault if it is no valid Unicode."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return Fault("lone surrogate", f"at character {error.start}")
    return text


def _turns(value: object) -> list[Turn] | Fault:
    """The turns with transformers' names of keys and roles."""
    if isinstance(value, Fault):
        return value
    if value is None:
        return Fault("null")
    if not isinstance(value, list):
        return Fault("not a conversation", f"it holds {type(value).__name__}, not a list of turns")
    if not value:
        return Fault("empty conversation")
    turns = list[Turn]()
    for number, entry in enumerate(value, start=1):
        turn = _turn(entry)
        if isinstance(turn, Fault):
            return Fault(turn.reason, f"turn {number}" + (f": {turn.detail}" if turn.detail else ""))
        turns.append(turn)
    return turns


def _turn(entry: object) -> Turn | Fault:
    if not isinstance(entry, dict):
        return Fault("not a turn", f"it holds {type(entry).__name__}, not role and content")
    share_gpt = entry.get("role") is None and "from" in entry
    role_key, content_key = ("from", "value") if share_gpt else ("role", "content")
    role = ROLES.get(str(entry.get(role_key)).lower())
    if role is None:
        return Fault("unknown role", repr(entry.get(role_key)))
    content = _content(entry.get(content_key), bool(entry.get("tool_calls")))
    if isinstance(content, Fault):
        return content
    others = {key: each for key, each in entry.items() if key not in (role_key, content_key) and each is not None}
    return {**others, "role": role, "content": content}


def _content(value: object, calls_a_tool: bool) -> str | Fault:
    """The text of a turn; "" for a call of a tool without words, which templates would else render as None."""
    if isinstance(value, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in value
    ):
        value = "".join(part["text"] for part in value)
    if value is None:
        return "" if calls_a_tool else Fault("a turn without content")
    if not isinstance(value, str):
        return Fault("content is not text", f"it holds {type(value).__name__}")
    if found := MARKS.search(value):
        return Fault("private-use character", f"U+{ord(found.group()):04X}, which marks assistant turns here")
    return clean(value)


def _is_marked(turn: Turn) -> bool:
    return turn["role"] == "assistant" and bool(turn["content"].strip())


def _marked(turn: Turn) -> Turn:
    """The turn with marks inside the white space around its content, which templates may strip."""
    if not _is_marked(turn):
        return turn
    content: str = turn["content"]
    start, end = len(content) - len(content.lstrip()), len(content.rstrip())
    return {**turn, "content": content[:start] + OPEN + content[start:end] + CLOSE + content[end:]}


def _rendered(plain: str, marked: str, turns: list[Turn]) -> Rendered | Fault:
    places = [(found.group(), found.start() - index) for index, found in enumerate(MARKS.finditer(marked))]
    if not places:
        return Fault("no assistant turn")
    if [mark for mark, _ in places] != [OPEN, CLOSE] * (len(places) // 2):
        return Fault("the chat template changes an assistant turn")
    pairs = [(places[i][1], places[i + 1][1]) for i in range(0, len(places), 2)]
    # A template may leave turns out; which are there is then not known, nor the white space after them.
    tails = [_tail(turn["content"]) for turn in turns] if len(turns) == len(pairs) else [""] * len(pairs)
    spans = [
        Span(start, end, end + len(tail) if plain.startswith(tail, end) else end)
        for (start, end), tail in zip(pairs, tails, strict=True)
    ]
    return Rendered(plain, tuple(spans))


def _tail(content: str) -> str:
    return content[len(content.rstrip()) :]
