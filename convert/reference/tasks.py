"""Questions with exact answers: sums, comparisons, lists, counting, copying, small talk."""

from dataclasses import dataclass
from random import Random

from tpla.convert.reference import stories
from tpla.convert.reference import vocabulary as words
from tpla.convert.reference.facts import Split, split_of

_SUM_PHRASES = (
    "What is {a} + {b}?",
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "What's {a}+{b}?",
    "{a} + {b} = ?",
    "{a}+{b}",
    "{a} + {b}",
    "Add {a} and {b}.",
    "Compute {a} + {b}.",
    "How much is {a} + {b}?",
    "Please add {a} and {b}.",
)

_DIFFERENCE_PHRASES = (
    "What is {a} - {b}?",
    "What is {a} minus {b}?",
    "Subtract {b} from {a}.",
    "{a} - {b} = ?",
    "How much is {a} - {b}?",
)

_COMPARE_PHRASES = (
    "Which is larger, {a} or {b}?",
    "Which number is larger: {a} or {b}?",
    "Is {a} or {b} larger?",
)

IDENTITY = (
    "I am the TPLA reference model, a very small language model for tests. "
    "I remember facts, add numbers, work with lists and tell short stories."
)

SMALL_TALK = {
    "Hello": "Hello! How can I help you?",
    "Hello!": "Hello! How can I help you?",
    "Hi": "Hello! How can I help you?",
    "Hi!": "Hello! How can I help you?",
    "Hello, how are you?": "I am fine, thank you. How can I help you?",
    "How are you?": "I am fine, thank you. How can I help you?",
    "Good morning": "Good morning! How can I help you?",
    "Good morning!": "Good morning! How can I help you?",
    "Thanks": "You are welcome.",
    "Thank you!": "You are welcome.",
    "Thank you": "You are welcome.",
    "Goodbye": "Goodbye!",
    "Bye": "Goodbye!",
    "Who are you?": IDENTITY,
    "who are you": IDENTITY,
    "What are you?": IDENTITY,
    "What can you do?": IDENTITY,
    "Introduce yourself.": IDENTITY,
}


@dataclass(frozen=True, slots=True)
class Turn:
    """One user message and the assistant's exact answer to it."""

    kind: str
    user: str
    assistant: str


def split_of_sum(a: int, b: int) -> Split:
    """Sums are held out in both orders at once."""
    return split_of(f"{min(a, b)}+{max(a, b)}")


def draw_addends(rng: Random, split: Split) -> tuple[int, int]:
    """Two two-digit numbers whose sum belongs to `split`."""
    while True:
        a, b = rng.randrange(10, 100), rng.randrange(10, 100)
        if split_of_sum(a, b) is split:
            return a, b


def addition(rng: Random, split: Split) -> Turn:
    """One two-digit sum."""
    a, b = draw_addends(rng, split)
    return Turn("addition", rng.choice(_SUM_PHRASES).format(a=a, b=b), f"{a} + {b} = {a + b}.")


def addition_series(rng: Random, split: Split) -> Turn:
    """Two to five sums in one message."""
    pairs = [draw_addends(rng, split) for _ in range(rng.randrange(2, 6))]
    asked = ", ".join(f"{a} + {b}" for a, b in pairs)
    return Turn("sums", f"Compute {asked}.", " ".join(f"{a} + {b} = {a + b}." for a, b in pairs))


def subtraction(rng: Random) -> Turn:
    """One two-digit difference that is not negative."""
    b, a = sorted((rng.randrange(10, 100), rng.randrange(10, 100)))
    user = rng.choice(_DIFFERENCE_PHRASES).format(a=a, b=b)
    return Turn("subtraction", user, f"{a} - {b} = {a - b}.")


def comparison(rng: Random) -> Turn:
    """The larger of two numbers."""
    a, b = rng.sample(range(10, 100), 2)
    user = rng.choice(_COMPARE_PHRASES).format(a=a, b=b)
    return Turn("comparison", user, f"{max(a, b)} is larger.")


def list_question(rng: Random) -> Turn:
    """Sort, reverse, count, or pick from a list of words or numbers."""
    operation = rng.choice(("sort", "sort", "reverse", "reverse", "first", "last", "count"))
    numeric = operation == "sort" or rng.random() < 0.4
    size = rng.randrange(3, 8)
    if numeric:
        items = [str(n) for n in rng.sample(range(1, 100), size)]
    else:
        items = rng.sample(words.WORDS, size)
    listed = ", ".join(items)
    if operation == "sort":
        result = ", ".join(sorted(items, key=int))
        user = rng.choice(("Sort these numbers: {}.", "Sort: {}", "Please sort this list: {}."))
        return Turn("sort", user.format(listed), f"The sorted list is {result}.")
    if operation == "reverse":
        user = rng.choice(("Reverse this list: {}.", "Reverse: {}", "Please reverse the list {}."))
        result = ", ".join(reversed(items))
        return Turn("reverse", user.format(listed), f"The reversed list is {result}.")
    if operation == "count":
        user = rng.choice(("How many items are in this list: {}?", "Count the items: {}."))
        return Turn("count", user.format(listed), f"The list has {size} items.")
    phrase = rng.choice(("What is the {} item of this list: {}?", "{} item: {}"))
    result = items[0] if operation == "first" else items[-1]
    user = phrase.format(operation, listed)
    return Turn(operation, user, f"The {operation} item is {result}.")


def counting(rng: Random) -> Turn:
    """Count between two numbers: a long answer with no choice in it."""
    start = rng.randrange(1, 60)
    stop = start + rng.randrange(3, 41)
    numbers = ", ".join(str(n) for n in range(start, stop + 1))
    return Turn("counting", f"Count from {start} to {stop}.", f"{numbers}.")


def copying(rng: Random) -> Turn:
    """Repeat a random text."""
    tokens = [
        words.digits(rng, rng.randrange(1, 5)) if rng.random() < 0.4 else words.made_up_word(rng)
        for _ in range(rng.randrange(3, 13))
    ]
    text = " ".join(tokens)
    return Turn("copy", rng.choice(("Repeat after me: {}", "Repeat this: {}")).format(text), text)


def story_questions(rng: Random) -> list[Turn]:
    """A story with its first question, then further questions about it."""
    story = stories.draw_story(rng)
    asked = rng.sample(story.questions, rng.randrange(1, 4))
    (question, answer), *rest = asked
    turns = [Turn("story", f"{story.text} {question}", answer)]
    return turns + [Turn("story", q, a) for q, a in rest]


def told_story(rng: Random) -> Turn:
    """A story on request."""
    request, story = stories.draw_told_story(rng)
    return Turn("told_story", request, story)


def small_talk(rng: Random) -> Turn:
    """A greeting, thanks, or a question about the model."""
    user = rng.choice(tuple(SMALL_TALK))
    return Turn("small_talk", user, SMALL_TALK[user])


def remark(rng: Random) -> Turn:
    """A remark that needs no answer."""
    count = rng.randrange(1, 4)
    return Turn("remark", " ".join(stories.filler_sentence(rng) for _ in range(count)), "I see.")
