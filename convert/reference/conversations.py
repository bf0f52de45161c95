"""Whole chats for training and calibration, and held-out questions for scoring."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from tpla.convert.reference import facts, stories, tasks
from tpla.convert.reference.facts import VALUE_ONLY, Fact, Split

ACKNOWLEDGE = "Okay, I will remember that."
SYSTEM_PROMPT = "You are a helpful assistant."
SIMILAR_KEYS = 0.4  # share of facts whose key is almost that of another fact of the chat
CHARS_PER_TOKEN = 2.7  # a rough figure, used only to choose how long a chat gets
OVERSHOOT = 196  # tokens kept free of a limit, because a chat ends after the step that reaches it


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat; `role` is system, user or assistant."""

    role: str
    content: str

    def as_dict(self) -> dict[str, str]:
        """The form that chat templates and the OpenAI protocol take."""
        return {"role": self.role, "content": self.content}


@dataclass(frozen=True, slots=True)
class Question:
    """A held-out question: `answer` is the only right reply to `messages`."""

    kind: str
    messages: tuple[Message, ...]
    answer: str
    value: str
    distance: int | None = None  # tokens between the fact and the end of the question


@dataclass(slots=True)
class _Chat:
    """A chat under construction: its messages and the facts told so far."""

    rng: Random
    split: Split = Split.TRAIN
    messages: list[Message] = field(default_factory=list)
    facts: dict[str, Fact] = field(default_factory=dict)
    reserved: str = ""  # a key that no fact of this chat may have
    length: int = 0  # characters so far

    def say(self, user: str, assistant: str) -> None:
        """Append one exchange."""
        self.messages += [Message("user", user), Message("assistant", assistant)]
        self.length += len(user) + len(assistant) + 6

    def new_fact(self) -> Fact:
        """Draw a fact whose key is new in this chat, and keep it."""
        fact = self.unknown_fact()
        self.facts[fact.key] = fact
        return fact

    def unknown_fact(self) -> Fact:
        """Draw a fact that this chat does not tell."""
        taken = [*self.facts, self.reserved] if self.reserved else list(self.facts)
        return facts.draw_fact(self.rng, self.split, taken, SIMILAR_KEYS)

    def pick_fact(self) -> Fact:
        """A fact told earlier, old ones as likely as new ones."""
        return self.rng.choice(list(self.facts.values()))


def _notes(chat: _Chat, sentences: int, fact_share: float) -> str:
    """A passage of filler sentences and facts."""
    return " ".join(
        chat.new_fact().statement()
        if chat.rng.random() < fact_share
        else stories.filler_sentence(chat.rng)
        for _ in range(sentences)
    )


def _question_and_answer(chat: _Chat) -> tuple[str, str]:
    """A question about a known fact, sometimes about one that was never told."""
    rng = chat.rng
    if rng.random() < 0.03:
        unknown = chat.unknown_fact()
        return unknown.ask(rng), unknown.unknown_answer
    fact = chat.pick_fact()
    if rng.random() < 0.1:
        return f"{fact.ask(rng)} {VALUE_ONLY}", fact.value
    return fact.ask(rng), fact.answer


def _tell(chat: _Chat) -> None:
    """The user tells one to four facts, or corrects one."""
    rng = chat.rng
    if chat.facts and rng.random() < 0.06:
        key = chat.pick_fact().key
        new = facts.draw_value_for(rng, key, chat.split)
        chat.facts[key] = new
        chat.say(f"Actually, {new.key} is now {new.value}.", ACKNOWLEDGE)
        return
    count = rng.choice((1, 1, 1, 2, 3, 4))
    chat.say(" ".join(chat.new_fact().tell(rng) for _ in range(count)), ACKNOWLEDGE)


def _ask(chat: _Chat) -> None:
    """The user asks for facts: often several in one message."""
    if not chat.facts:
        _tell(chat)
    count = chat.rng.choice((1, 1, 1, 2, 3))
    pairs = [_question_and_answer(chat) for _ in range(count)]
    chat.say(" ".join(q for q, _ in pairs), " ".join(a for _, a in pairs))


def _notes_and_question(chat: _Chat) -> None:
    """A passage with facts, with or without a question at its end."""
    rng = chat.rng
    text = _notes(chat, rng.randrange(2, 16), rng.choice((0.2, 0.5, 0.9)))
    if rng.random() < 0.5 and chat.facts:
        question, answer = _question_and_answer(chat)
        chat.say(f"{text} {question}", answer)
    else:
        chat.say(text, ACKNOWLEDGE)


def _task(chat: _Chat) -> None:
    """An exchange that does not depend on the facts."""
    rng, split = chat.rng, chat.split
    kind = rng.random()
    if kind < 0.34:
        turn = tasks.addition(rng, split)
    elif kind < 0.46:
        turn = tasks.addition_series(rng, split)
    elif kind < 0.54:
        turn = tasks.subtraction(rng)
    elif kind < 0.58:
        turn = tasks.comparison(rng)
    elif kind < 0.76:
        turn = tasks.list_question(rng)
    elif kind < 0.79:
        turn = tasks.counting(rng)
    elif kind < 0.83:
        turn = tasks.copying(rng)
    elif kind < 0.87:
        turn = tasks.told_story(rng)
    else:
        for story_turn in tasks.story_questions(rng):
            chat.say(story_turn.user, story_turn.assistant)
        return
    chat.say(turn.user, turn.assistant)


def _small_talk(chat: _Chat) -> None:
    """A greeting or a remark."""
    turn = tasks.small_talk(chat.rng) if chat.rng.random() < 0.4 else tasks.remark(chat.rng)
    chat.say(turn.user, turn.assistant)


_STEPS: tuple[Callable[[_Chat], None], ...] = (_tell, _ask, _notes_and_question, _task, _small_talk)
_MIXES = (  # weights of the steps above; one mix per chat
    (3, 6, 1, 4, 1),
    (2, 8, 3, 1, 1),
    (1, 3, 1, 10, 1),
    (2, 6, 0, 2, 5),
)


def _chat_length(rng: Random, longest: int) -> int:
    """A target length in tokens: many short chats, most tokens in long ones."""
    kind = rng.random()
    if kind < 0.35:
        length = rng.randrange(30, 400)
    elif kind < 0.65:
        length = rng.randrange(400, 1300)
    elif kind < 0.9:
        length = rng.randrange(1300, 2000)
    else:
        length = rng.randrange(2000, max(3900, longest - OVERSHOOT))
    return min(length, longest)


def _start(rng: Random, split: Split) -> _Chat:
    """An empty chat, or one with a system message that may hold facts."""
    chat = _Chat(rng, split)
    kind = rng.random()
    if kind < 0.3:
        text = SYSTEM_PROMPT
        if kind < 0.1:
            text += " " + _notes(chat, rng.randrange(1, 6), 0.7)
        chat.messages.append(Message("system", text))
        chat.length += len(text)
    return chat


def draw_conversation(
    rng: Random, split: Split = Split.TRAIN, longest_tokens: int = 3900
) -> list[Message]:
    """One chat whose facts and sums all belong to `split`."""
    chat = _start(rng, split)
    limit = _chat_length(rng, longest_tokens) * CHARS_PER_TOKEN
    weights = rng.choice(_MIXES)
    if rng.random() < 0.2:  # long notes first, then mostly questions about them
        sentences = max(2, int(limit * rng.uniform(0.3, 0.7) / 45))
        chat.say(_notes(chat, sentences, rng.uniform(0.15, 0.6)), ACKNOWLEDGE)
        weights = (1, 12, 0, 1, 1)
    while True:
        (step,) = rng.choices(_STEPS, weights)
        step(chat)
        if chat.length >= limit:
            return chat.messages


def recall_question(
    rng: Random, distance: int, count_tokens: Callable[[str], int], in_one_message: bool = False
) -> Question:
    """A held-out fact, at least `distance` tokens of other turns, then the question about it.

    `count_tokens` says how many tokens a text has.
    """
    fact = facts.draw_fact(rng, Split.TEST, ())
    chat = _Chat(rng, Split.TEST, reserved=fact.key)
    opening, between = fact.tell(rng), ""
    length = 0
    while length < distance:
        if in_one_message:
            addition = " " + _notes(chat, 1, 0.3)
            between += addition
        else:
            before = len(chat.messages)
            step = rng.choices(_STEPS, (3, 3, 1, 4, 2))[0]
            step(chat)
            addition = "".join(m.content for m in chat.messages[before:])
        length += count_tokens(addition)
    question = fact.ask(rng)
    if in_one_message:
        opening = f"{fact.statement()}{between}"
        messages = [Message("user", f"{opening} {question}")]
    else:
        first = [Message("user", opening), Message("assistant", ACKNOWLEDGE)]
        messages = [*first, *chat.messages, Message("user", question)]
    return Question("recall", tuple(messages), fact.answer, fact.value, length)


def _as_question(turns: list[tasks.Turn]) -> Question:
    """The last turn is asked; the ones before it are given."""
    *given, asked = turns
    messages = [
        message
        for turn in given
        for message in (Message("user", turn.user), Message("assistant", turn.assistant))
    ]
    messages.append(Message("user", asked.user))
    return Question(asked.kind, tuple(messages), asked.assistant, asked.assistant)


def task_question(rng: Random, kind: str) -> Question:
    """One question of a kind that needs no told fact."""
    makers: dict[str, Callable[[], list[tasks.Turn]]] = {
        "addition": lambda: [tasks.addition(rng, Split.TEST)],
        "subtraction": lambda: [tasks.subtraction(rng)],
        "comparison": lambda: [tasks.comparison(rng)],
        "list": lambda: [tasks.list_question(rng)],
        "counting": lambda: [tasks.counting(rng)],
        "copy": lambda: [tasks.copying(rng)],
        "story": lambda: tasks.story_questions(rng),
        "told_story": lambda: [tasks.told_story(rng)],
        "small_talk": lambda: [tasks.small_talk(rng)],
    }
    if kind not in makers:
        raise ValueError(f"unknown kind of question {kind!r}: use one of {', '.join(makers)}")
    return _as_question(makers[kind]())
