"""Questions about pictures of shapes with their answers, and a few about shapes and colours without a picture."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import chain
from random import Random
from typing import Any

from recipes.tiny.scenes import COLOURS, PLACES, SHAPES, Scene, Thing

IMAGE = "<image>"
TEXT_SHARE = 0.1
TWO_TURN_SHARE = 0.3
Turns = list[tuple[str, str]]  # questions with their answers
NUMBERS = ("no", "one", "two", "three")
SIDES = {
    "to the left of": lambda other, thing: other.column < thing.column,
    "to the right of": lambda other, thing: other.column > thing.column,
    "above": lambda other, thing: other.row < thing.row,
    "below": lambda other, thing: other.row > thing.row,
}
DESCRIBE = (
    "What do you see?",
    "Describe the picture.",
    "What is in this image?",
    "Tell me what the picture shows.",
)
COUNT = ("How many shapes are there?", "Count the shapes, please.", "How many things can you see?")
FACTS = {
    "How many sides does a square have?": "A square has four sides. All of them are equally long, and its corners are"
    " right angles.",
    "How many corners does a triangle have?": "A triangle has three corners, and it has as many sides. No flat shape"
    " with straight sides has fewer.",
    "What is a circle?": "A circle is a round shape without corners. Every point of it is equally far from the centre.",
    "Does a circle have corners?": "No, a circle has no corners at all. It is round, and it looks the same from every"
    " side.",
    "What is a cross?": "A cross is made of two bars that meet in the middle. It has four arms of the same length.",
    "Which colour do blue and yellow give?": "If you mix blue and yellow paint, you get green. With more blue in it"
    " the green becomes darker.",
    "Which colour do red and yellow give?": "If you mix red and yellow paint, you get orange. With more red in it the"
    " orange becomes darker.",
    "Which colour do red and blue give?": "If you mix red and blue paint, you get purple. With more white in it the"
    " purple becomes lighter.",
    "What colour is grass?": "Grass is green, as most leaves are. When it is dry for a long time, it turns yellow.",
    "What colour is the sky?": "On a clear day the sky is blue. In the evening it may be red, orange or purple.",
    "What colour is a lemon?": "A ripe lemon is yellow. Before it is ripe it is green, like most other fruit.",
    "What is darker, black or grey?": "Black is darker than grey. If you mix black and white paint, you get grey.",
}
ASKS = ("", "Please tell me: ", "A question: ", "Do you know this? ")


def sized_name(thing: Thing) -> str:
    """Return a shape with its size and an article."""
    return f"a {thing.size} {thing.name}"


def join_words(parts: Sequence[str]) -> str:
    """Join parts as in a, b and c."""
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


def capitalise(text: str) -> str:
    """Return a text as the beginning of a sentence; unlike `str.capitalize` it keeps later capitals."""
    return text[0].upper() + text[1:]


def count_shapes(count: int, word: str = "shape") -> str:
    """Return a number of shapes in words, as in `two circles`."""
    if count != 1:
        word += "es" if word == "cross" else "s"
    return f"{NUMBERS[count]} {word}"


def be(count: int) -> str:
    """Return the verb for so many shapes."""
    return "is" if count == 1 else "are"


def describe(scene: Scene, random: Random) -> tuple[str, str]:
    """What do you see? All shapes with their places."""
    count = len(scene.things)
    shapes = f"{count_shapes(count)} on a {scene.background} background"
    openings = (f"There {be(count)} {shapes}.", f"The picture shows {shapes}.", f"I see {shapes}.")
    wordings = (
        lambda thing: f"{capitalise(thing.place)} there is {sized_name(thing)}.",
        lambda thing: f"{capitalise(sized_name(thing))} is {thing.place}.",
        lambda thing: f"I can see {sized_name(thing)} {thing.place}.",
    )
    wording = random.choice(wordings)
    question = random.choice(DESCRIBE)
    sentences = [random.choice(openings), *map(wording, scene.things)]
    return question, " ".join(sentences)


def count_all(scene: Scene, random: Random) -> tuple[str, str]:
    """How many shapes are there? Their number and their names."""
    count = len(scene.things)
    shapes = count_shapes(count)
    names = join_words([sized_name(thing) for thing in scene.things])
    answers = (
        f"I count {shapes} in the picture: {names}.",
        f"There {be(count)} {shapes} on the {scene.background} background, {names}.",
    )
    return random.choice(COUNT), random.choice(answers)


def count_kind(scene: Scene, random: Random) -> tuple[str, str]:
    """How many circles are there? Their number, and their places or what is there instead."""
    # Shapes that are there are asked for more often.
    kind = random.choice([*SHAPES, *(thing.shape for thing in scene.things)])
    matches = [thing for thing in scene.things if thing.shape == kind]
    plural = count_shapes(2, kind).removeprefix("two ")
    question = random.choice((f"How many {plural} are there?", f"How many {plural} do you see?"))
    if matches:
        count = len(matches)
        where = join_words([f"the {thing.colour} one {thing.place}" for thing in matches])
        return question, f"There {be(count)} {count_shapes(count, kind)}: {where}."
    names = join_words([sized_name(thing) for thing in scene.things])
    return question, f"There are no {plural} in this picture. I only see {names}."


def ask_colour(scene: Scene, random: Random) -> tuple[str, str]:
    """What colour is the circle? Its colour, size and place; about a form that the scene has once, if there is one."""
    kinds = [thing.shape for thing in scene.things]
    once = [thing for thing in scene.things if kinds.count(thing.shape) == 1]
    if not once:
        return describe(scene, random)
    thing = random.choice(once)
    questions = (f"What colour is the {thing.shape}?", f"Which colour does the {thing.shape} have?")
    answers = (
        f"The {thing.shape} {thing.place} is {thing.colour}, on a background that is {scene.background}.",
        f"It is {thing.colour}. The {thing.shape} is {thing.place}, and it is a {thing.size} one.",
    )
    return random.choice(questions), random.choice(answers)


def ask_place(scene: Scene, random: Random) -> tuple[str, str]:
    """Where is the red circle? Its place, and what else is there."""
    thing = random.choice(scene.things)
    others = [f"{sized_name(other)} {other.place}" for other in scene.things if other != thing]
    rest = (
        f"Besides it there is {join_words(others)}."
        if others
        else "There is nothing else in the picture."
    )
    questions = (f"Where is the {thing.name}?", f"Where do you see the {thing.name}?")
    place = thing.place
    if place in ("on the left", "on the right"):
        place += " side"
    return random.choice(questions), f"The {thing.name} is {place} of the picture. {rest}"


def ask_side(scene: Scene, random: Random) -> tuple[str, str]:
    """What is to the left of the red circle? The shapes that are, or that there are none."""
    thing = random.choice(scene.things)
    words, is_there = random.choice(list(SIDES.items()))
    others = [sized_name(other) for other in scene.things if is_there(other, thing)]
    questions = (
        f"What is {words} the {thing.name}?",
        f"Which shapes are {words} the {thing.name}?",
    )
    question = random.choice(questions)
    if others:
        return question, f"{capitalise(words)} the {thing.name} there is {join_words(others)}."
    return question, f"Nothing is {words} the {thing.name}, which is {thing.place}."


def ask_what(scene: Scene, random: Random) -> tuple[str, str]:
    """What is at the top? The shape, or where there are some instead."""
    # Places with a shape are asked for more often.
    place = random.choice([*PLACES.values(), *(3 * [thing.place for thing in scene.things])])
    question = random.choice((f"What is {place}?", f"What do you see {place}?"))
    for thing in scene.things:
        if thing.place == place:
            return (
                question,
                f"{capitalise(place)} I see {sized_name(thing)} on a {scene.background} background.",
            )
    rest = join_words([f"{sized_name(thing)} {thing.place}" for thing in scene.things])
    return question, f"There is nothing {place}. There is {rest}."


KINDS: dict[str, tuple[int, Callable[[Scene, Random], tuple[str, str]]]] = {
    "describe": (4, describe),
    "count": (2, count_all),
    "count-kind": (2, count_kind),
    "colour": (3, ask_colour),
    "place": (3, ask_place),
    "side": (3, ask_side),
    "what": (3, ask_what),
}


def ask_fact(random: Random) -> tuple[str, str]:
    """Return a question that needs no picture, and its answer."""
    question, answer = random.choice(list(FACTS.items()))
    return random.choice(ASKS) + question, answer


def ask_scene(scene: Scene, random: Random) -> Turns:
    """Return one or two questions about a scene with their answers, the second of another kind than the first."""
    has_second = random.random() < TWO_TURN_SHARE
    weights = [weight for weight, _ in KINDS.values()]
    first = random.choices(list(KINDS), weights)[0]
    second = random.choices(list(KINDS), weights)[0]
    if second == first:
        second = "side" if first == "colour" else "colour"
    kinds = [first, second] if has_second else [first]
    return [KINDS[kind][1](scene, random) for kind in kinds]


def make_record(name: str, turns: Turns, image: str | None) -> dict[str, Any]:
    """Return a record in the format of LLaVA's data: the first question begins with the mark of the image."""
    record: dict[str, Any] = {"id": name}
    texts = list(chain.from_iterable(turns))
    if image is not None:
        record["image"] = image
        texts[0] = f"{IMAGE}\n{texts[0]}"
    record["conversations"] = [
        {"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(texts)
    ]
    return record


def words_seen(question: str, answer: str) -> list[str]:
    """Return the colours and forms that an answer names and its question does not, sorted."""
    words = re.split(r"[\s,.:]+", answer.lower())
    return sorted(
        word for word in words if word in {*COLOURS, *SHAPES} and word not in question.lower()
    )
