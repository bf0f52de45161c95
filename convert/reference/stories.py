"""Filler sentences, small stories with questions, and stories told on request."""

from dataclasses import dataclass
from random import Random

from tpla.convert.reference import vocabulary as words
from tpla.convert.reference.facts import sentence_case

_FILLERS = (
    "{name} walked to the {place} {time}.",
    "The {animal} slept near the {place}.",
    "It was a quiet day in {city}.",
    "{name} and {other} talked about the {color} {thing}.",
    "The weather in {city} was fine on {day}.",
    "Nobody saw the {animal} behind the {thing}.",
    "{name} bought a {fruit} at the {place}.",
    "The {place} opens {time}.",
    "There is a {color} {thing} in the {place}.",
    "{name} likes the {place} more than the {second}.",
    "On {day} the {job} went to {city}.",
    "The old {thing} was moved to the {place}.",
    "We had {fruit} and bread {time}.",
    "{name} is a friend of {other}.",
    "The train to {city} was late on {day}.",
    "A {job} fixed the {thing} {time}.",
)


def _slots(rng: Random) -> dict[str, str]:
    """One random word for each slot of the filler sentences."""
    return {
        "name": rng.choice(words.NAMES),
        "other": rng.choice(words.NAMES),
        "place": rng.choice(words.PLACES),
        "second": rng.choice(words.PLACES),
        "animal": rng.choice(words.ANIMALS),
        "city": rng.choice(words.CITIES),
        "color": rng.choice(words.COLORS),
        "thing": rng.choice(words.OBJECTS),
        "fruit": rng.choice(words.FRUITS),
        "job": rng.choice(words.JOBS),
        "day": rng.choice(words.DAYS),
        "time": rng.choice(words.TIMES),
    }


def filler_sentence(rng: Random) -> str:
    """A sentence that states nothing anyone asks about."""
    return rng.choice(_FILLERS).format_map(_slots(rng))


@dataclass(frozen=True, slots=True)
class Story:
    """A short story and its questions, each with the exact answer."""

    text: str
    questions: tuple[tuple[str, str], ...]


def draw_story(rng: Random) -> Story:
    """Someone finds a thing at a place, gives it away, and it ends up somewhere."""
    finder, taker = rng.sample(words.NAMES, 2)
    found_at, kept_at = rng.sample(words.PLACES, 2)
    thing = f"{rng.choice(words.COLORS)} {rng.choice(words.OBJECTS)}"
    animal, time = rng.choice(words.ANIMALS), rng.choice(words.TIMES)
    text = (
        f"{sentence_case(time)}, {finder} went to the {found_at} with a {animal}. "
        f"There {finder} found a {thing}. {finder} gave the {thing} to {taker}. "
        f"{taker} was happy and took the {thing} to the {kept_at}."
    )
    questions = (
        (f"Who found the {thing}?", f"{finder} found the {thing}."),
        (f"Where did {finder} find the {thing}?", f"{finder} found the {thing} at the {found_at}."),
        (f"Who took the {thing} to the {kept_at}?", f"{taker} took the {thing} to the {kept_at}."),
        (f"Where is the {thing} now?", f"The {thing} is now at the {kept_at}."),
        (f"What did {finder} find?", f"{finder} found a {thing}."),
        (f"Which animal went with {finder}?", f"The {animal} went with {finder}."),
    )
    return Story(text, questions)


def draw_told_story(rng: Random) -> tuple[str, str]:
    """(request, story): the story follows from the request alone, so it can be checked."""
    name, place = rng.choice(words.NAMES), rng.choice(words.PLACES)
    animal, thing = rng.choice(words.ANIMALS), rng.choice(words.OBJECTS)
    request = f"Tell me a story about a {animal} named {name}, a {thing} and the {place}."
    story = (
        f"Once there was a {animal} named {name}. {name} lived near the {place}. "
        f"One day {name} lost a {thing}. {name} looked for the {thing} in the {place} all day. "
        f"At night {name} found the {thing} under a tree. {name} was happy and went home. "
        f"After that day the {animal} never lost the {thing} again."
    )
    return request, story
