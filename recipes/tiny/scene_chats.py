"""Questions about pictures of shapes with their answers, and a few about shapes and colours without a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from recipes.tiny.scenes import COLOURS, PLACES, SHAPES, Scene, Thing

IMAGE = "<image>"
TEXT_SHARE, TWO_TURN_SHARE = 0.1, 0.3
Turns = list[tuple[str, str]]  # questions with their answers
NUMBERS = ("no", "one", "two", "three")
SIDES = {
    "to the left of": lambda other, thing: other.column < thing.column,
    "to the right of": lambda other, thing: other.column > thing.column,
    "above": lambda other, thing: other.row < thing.row,
    "below": lambda other, thing: other.row > thing.row,
}
DESCRIBE = ("What do you see?", "Describe the picture.", "What is in this image?", "Tell me what the picture shows.")
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
    """A shape with its size, behind an article."""
    return f"a {thing.size} {thing.name}"


def join_words(parts: Sequence[str]) -> str:
    """Parts as one list in words: a, b and c."""
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def capitalise(text: str) -> str:
    """A text as the beginning of a sentence."""
    return text[0].upper() + text[1:]


def count_shapes(count: int, word: str = "shape") -> str:
    """So many shapes, as in `two circles`."""
    plural = {"cross": "crosses"}.get(word, word + "s")
    return f"{NUMBERS[count]} {word if count == 1 else plural}"


def describe(scene: Scene, random: Random) -> tuple[str, str]:
    """What do you see? All shapes with their places."""
    count, ground = count_shapes(len(scene.things)), f"on a {scene.background} background"
    be = "is" if len(scene.things) == 1 else "are"
    openings = (
        f"There {be} {count} {ground}.",
        f"The picture shows {count} {ground}.",
        f"I see {count} {ground}.",
    )
    wordings = (
        lambda thing: f"{capitalise(thing.place)} there is {sized_name(thing)}.",
        lambda thing: f"{capitalise(sized_name(thing))} is {thing.place}.",
        lambda thing: f"I can see {sized_name(thing)} {thing.place}.",
    )
    style = random.choice(wordings)
    return random.choice(DESCRIBE), " ".join([random.choice(openings), *map(style, scene.things)])


def count_all(scene: Scene, random: Random) -> tuple[str, str]:
    """How many shapes are there? Their number and their names."""
    count, names = count_shapes(len(scene.things)), join_words([sized_name(thing) for thing in scene.things])
    answers = (
        f"I count {count} in the picture: {names}.",
        f"There {'is' if len(scene.things) == 1 else 'are'} {count} on the {scene.background} background, {names}.",
    )
    return random.choice(COUNT), random.choice(answers)


def count_kind(scene: Scene, random: Random) -> tuple[str, str]:
    """How many circles are there? Their number, and their places or what is there instead."""
    kind = random.choice([*SHAPES, *(thing.shape for thing in scene.things)])
    some = [thing for thing in scene.things if thing.shape == kind]
    plural = count_shapes(2, kind).removeprefix("two ")
    question = random.choice((f"How many {plural} are there?", f"How many {plural} do you see?"))
    if some:
        where = join_words([f"the {thing.colour} one {thing.place}" for thing in some])
        return question, f"There {'is' if len(some) == 1 else 'are'} {count_shapes(len(some), kind)}: {where}."
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
    rest = f"Besides it there is {join_words(others)}." if others else "There is nothing else in the picture."
    questions = (f"Where is the {thing.name}?", f"Where do you see the {thing.name}?")
    place = thing.place + (" side" if thing.place in ("on the left", "on the right") else "")
    return random.choice(questions), f"The {thing.name} is {place} of the picture. {rest}"


def ask_side(scene: Scene, random: Random) -> tuple[str, str]:
    """What is to the left of the red circle? The shapes that are, or that there are none."""
    thing, (words, is_there) = random.choice(scene.things), random.choice(list(SIDES.items()))
    others = [sized_name(other) for other in scene.things if is_there(other, thing)]
    questions = (f"What is {words} the {thing.name}?", f"Which shapes are {words} the {thing.name}?")
    if others:
        return random.choice(questions), f"{capitalise(words)} the {thing.name} there is {join_words(others)}."
    return random.choice(questions), f"Nothing is {words} the {thing.name}, which is {thing.place}."


def ask_what(scene: Scene, random: Random) -> tuple[str, str]:
    """What is at the top? The shape, or where there are some instead."""
    place = random.choice([*PLACES.values(), *(3 * [thing.place for thing in scene.things])])
    questions = (f"What is {place}?", f"What do you see {place}?")
    for thing in scene.things:
        if thing.place == place:
            seen = f"{sized_name(thing)} on a {scene.background} background"
            return random.choice(questions), f"{capitalise(place)} I see {seen}."
    rest = join_words([f"{sized_name(thing)} {thing.place}" for thing in scene.things])
    return random.choice(questions), f"There is nothing {place}. There is {rest}."


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
    """A question that needs no picture, and its answer."""
    question, answer = random.choice(list(FACTS.items()))
    return random.choice(ASKS) + question, answer


def ask_scene(scene: Scene, random: Random) -> Turns:
    """One or two questions about a scene with their answers, the second of another kind than the first."""
    turns = 2 if random.random() < TWO_TURN_SHARE else 1
    first, second = ((random.choices(list(KINDS), [weight for weight, _ in KINDS.values()])[0]) for _ in range(2))
    if first == second:
        second = "colour" if first != "colour" else "side"
    return [KINDS[kind][1](scene, random) for kind in (first, second)[:turns]]


def make_record(name: str, turns: Turns, image: str | None) -> dict[str, Any]:
    """A record as LLaVA's data has them: the first question begins with the mark of the image."""
    texts = [text for turn in turns for text in turn]
    if image is not None:
        texts[0] = f"{IMAGE}\n{texts[0]}"
    values = [{"from": ("human", "gpt")[place % 2], "value": text} for place, text in enumerate(texts)]
    return {"id": name, **({} if image is None else {"image": image}), "conversations": values}


def words_seen(question: str, answer: str) -> list[str]:
    """The colours and forms that an answer names and its question does not, sorted."""
    words = answer.lower().replace(",", " ").replace(".", " ").replace(":", " ").split()
    return sorted(word for word in words if word in {*COLOURS, *SHAPES} and word not in question.lower())
