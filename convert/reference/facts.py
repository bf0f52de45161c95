"""Facts that a user tells and asks back, and the split that keeps test facts out of training."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from zlib import crc32

from tpla.convert.reference import vocabulary as words

TELL_PHRASES = (
    "{K} is {v}.",
    "{K} is {v}.",
    "{K} is {v}. Please remember it.",
    "{K} is {v}. Please remember that.",
    "{K} is {v}. Remember this.",
    "Please remember that {k} is {v}.",
    "Please remember: {k} is {v}.",
    "Remember that {k} is {v}.",
    "Note that {k} is {v}.",
    "Keep in mind that {k} is {v}.",
    "I want to tell you that {k} is {v}.",
    "By the way, {k} is {v}.",
    "Just so you know, {k} is {v}.",
    "Hello, {k} is {v}.",
    "Hi! {K} is {v}.",
    "{k} is {v}",
)

ASK_PHRASES = (
    "What is {k}?",
    "What is {k}?",
    "What's {k}?",
    "what is {k}",
    "What was {k}?",
    "What is {k} again?",
    "Tell me {k}.",
    "Please tell me {k}.",
    "Can you tell me {k}?",
    "Do you remember {k}?",
    "I forgot {k}. What is it?",
    "What did I say {k} was?",
    "Remind me, what is {k}?",
    "Question: what is {k}?",
    "Thanks. What is {k}?",
    "And what is {k}?",
)

VALUE_ONLY = "Answer with the value only."


_OWN_FROM_LIST = (
    "name",
    "job",
    "favorite color",
    "favorite fruit",
    "favorite animal",
    "favorite city",
    "favorite day",
    "birthday month",
)
_OF_A_PERSON = (
    "favorite color",
    "favorite fruit",
    "favorite city",
    "job",
    "phone number",
    "room number",
)
_OWN_FREE = ("secret word", "nickname", "phone number", "room number", "lucky number")
_FEW_VALUES = frozenset(f"my {attribute}" for attribute in _OWN_FROM_LIST)


class Split(StrEnum):
    """Which side of the held-out boundary a fact or a sum is on."""

    TRAIN = "train"
    TEST = "test"


def split_of(text: str) -> Split:
    """One text in ten is held out, by a hash that does not depend on the process."""
    return Split.TEST if crc32(text.encode()) % 10 == 0 else Split.TRAIN


def sentence_case(text: str) -> str:
    """`text` with its first letter in upper case and the rest unchanged."""
    return text[:1].upper() + text[1:]


@dataclass(frozen=True, slots=True)
class Fact:
    """`key` is `value`; both as written in the middle of a sentence."""

    key: str
    value: str

    @property
    def split(self) -> Split:
        """The pair of key and value is what is held out.

        A key that takes few values belongs to training with all of them: with some held out,
        the model would learn that they never occur.
        """
        if self.key in _FEW_VALUES:
            return Split.TRAIN
        return split_of(f"{self.key}={self.value}")

    @property
    def key_to_user(self) -> str:
        """The key as the assistant says it: 'my code' becomes 'your code'."""
        return "your" + self.key[2:] if self.key.startswith("my ") else self.key

    def tell(self, rng: Random) -> str:
        """A user sentence that states the fact."""
        phrase = rng.choice(TELL_PHRASES)
        return phrase.format(K=sentence_case(self.key), k=self.key, v=self.value)

    def statement(self) -> str:
        """The plain sentence that states the fact."""
        return f"{sentence_case(self.key)} is {self.value}."

    def ask(self, rng: Random) -> str:
        """A user question about the fact."""
        return rng.choice(ASK_PHRASES).format(k=self.key)

    @property
    def answer(self) -> str:
        """The assistant's answer; the value comes after the key, so decode has to find it."""
        return f"{sentence_case(self.key_to_user)} is {self.value}."

    @property
    def unknown_answer(self) -> str:
        """The assistant's answer when the fact was never told."""
        return f"I do not know {self.key_to_user}."


_TWO_WORDS = ("secret", "phone", "room", "favorite", "lucky", "birthday")
_NUMBERED = ("code", "number", "password", "pin", "price", "label")


def _value(rng: Random, attribute: str) -> str:
    """A random value that fits the attribute."""
    if attribute in ("password", "label", "secret word", "nickname"):
        return words.made_up_word(rng) if rng.random() < 0.7 else rng.choice(words.WORDS)
    lists = {
        "color": words.COLORS,
        "fruit": words.FRUITS,
        "animal": words.ANIMALS,
        "city": words.CITIES,
        "job": words.JOBS,
        "name": words.NAMES,
        "month": words.MONTHS,
        "day": words.DAYS,
    }
    last = attribute.rsplit(" ", 1)[-1]
    if last in lists:
        return rng.choice(lists[last])
    return words.digits(rng, rng.choice((3, 4, 4, 4, 5, 6)))


def _own_key(rng: Random) -> str:
    """A key about the user."""
    if rng.random() < 0.6:
        attribute = rng.choice(_NUMBERED)
        thing = rng.choice((*words.OBJECTS, *words.PLACES))
        color = rng.choice(words.COLORS) + " " if rng.random() < 0.3 else ""
        return f"my {color}{thing} {attribute}"
    attribute = rng.choice((*_OWN_FROM_LIST, *_OWN_FREE, *_OWN_FREE))
    return f"my {attribute}"


def _other_key(rng: Random) -> str:
    """A key about a person, a thing of a person, or a place."""
    kind = rng.random()
    name = rng.choice(words.NAMES) if rng.random() < 0.85 else words.made_up_word(rng).title()
    if kind < 0.5:
        attribute = rng.choice(_NUMBERED)
        thing = f"{rng.choice(words.COLORS)} {rng.choice(words.OBJECTS)}"
        return f"the {attribute} of {name}'s {thing}"
    if kind < 0.8:
        return f"{name}'s {rng.choice(_OF_A_PERSON)}"
    attribute = rng.choice(_NUMBERED)
    return f"the {attribute} of the {rng.choice(words.COLORS)} {rng.choice(words.PLACES)}"


def _attribute_of(key: str) -> str:
    """The attribute that a key asks for: 'code' in 'the code of the red tower'."""
    if key.startswith("the "):
        return key.split(" ", 2)[1]
    words_of_key = key.split(" ")
    return " ".join(words_of_key[-2:]) if words_of_key[-2] in _TWO_WORDS else words_of_key[-1]


_EXCHANGEABLE = (
    _NUMBERED,
    words.COLORS,
    words.OBJECTS,
    words.PLACES,
    tuple(f"{name}'s" for name in words.NAMES),
)


def _similar_key(rng: Random, key: str) -> str:
    """`key` with one word exchanged: 'my red box code' becomes 'my blue box code'."""
    parts = key.split(" ")
    choices = [
        (index, group)
        for index, part in enumerate(parts)
        for group in _EXCHANGEABLE
        if part in group
    ]
    if choices:
        index, group = rng.choice(choices)
        parts[index] = rng.choice(group)
    return " ".join(parts)


def draw_fact(rng: Random, split: Split, taken: Sequence[str], similar: float = 0.0) -> Fact:
    """A random fact of `split` whose key is not in `taken`.

    With probability `similar` its key differs in one word from one in `taken`.
    """
    while True:
        if taken and rng.random() < similar:
            key = _similar_key(rng, rng.choice(taken))
        else:
            key = _own_key(rng) if rng.random() < 0.4 else _other_key(rng)
        fact = Fact(key, _value(rng, _attribute_of(key)))
        if key not in taken and fact.split is split:
            return fact


def draw_value_for(rng: Random, key: str, split: Split) -> Fact:
    """A fact of `split` with a new random value for a known key."""
    while True:
        fact = Fact(key, _value(rng, _attribute_of(key)))
        if fact.split is split:
            return fact
