"""Word lists of the generator, and random made-up words."""

from random import Random


def _words(text: str) -> list[str]:
    """The words of a line."""
    return text.split()


NAMES = _words(
    "Anna Ben Carla David Emma Felix Grace Henry Iris Jack Kate Leo Maria Noah Olivia Paul Quinn "
    "Rosa Sam Tina Uma Victor Wendy Xavier Yara Zoe Alan Bella Chris Diana Eric Fiona George Hanna "
    "Ivan Julia Karl Laura Mark Nina Oscar Peter Ruth Simon Tom Vera Walter Alice Bob Clara Dan "
    "Ella Frank Gina Hugo Ida Jonas Kim Linda Max Nora Otto Pia Ralph Sara Tim Ursula Will"
)

COLORS = _words("red blue green yellow black white brown orange purple pink gray silver golden")

OBJECTS = _words(
    "box bag cup book lamp chair table car bike boat phone clock key hat coat shoe ring door "
    "drawer desk bottle basket camera piano guitar drum kite tent rope ladder bucket wallet "
    "suitcase umbrella mirror pillow blanket candle hammer shelf cabinet locker safe trunk "
    "printer laptop radio notebook folder ticket parcel jar bowl knife spoon plate"
)

PLACES = _words(
    "garden forest market library school office kitchen station harbor museum park river "
    "castle tower bridge village farm beach hotel bakery theater church island cave valley"
)

CITIES = _words(
    "Paris London Berlin Madrid Rome Vienna Tokyo Oslo Lisbon Prague Dublin Athens Cairo Boston "
    "Chicago Denver Seattle Toronto Sydney Lima Delhi Seoul Zurich Geneva Munich"
)

ANIMALS = _words(
    "fox dog cat bear owl wolf rabbit horse lion tiger mouse duck goat frog deer crow eagle "
    "whale turtle hedgehog squirrel"
)

FRUITS = _words("apple pear plum mango banana cherry grape lemon melon peach fig kiwi papaya")

JOBS = _words(
    "doctor teacher baker farmer pilot nurse lawyer painter singer driver cook sailor writer judge"
)

MONTHS = _words(
    "January February March April May June July August September October November December"
)

DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")

TIMES = [
    "in the morning",
    "at noon",
    "in the evening",
    "at night",
    "after lunch",
    "before breakfast",
]

WORDS = tuple(sorted({*COLORS, *OBJECTS, *PLACES, *ANIMALS, *FRUITS, *JOBS}))

_CONSONANTS = "bdfgklmnprstvz"
_VOWELS = "aeiou"


def made_up_word(rng: Random) -> str:
    """A pronounceable word of two or three syllables that is in no list."""
    syllables = rng.choice((2, 2, 3))
    return "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(syllables))


def digits(rng: Random, length: int) -> str:
    """A number of exactly `length` digits whose first digit is not zero."""
    return str(rng.randrange(10 ** (length - 1), 10**length))
