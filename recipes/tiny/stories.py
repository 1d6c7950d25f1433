"""Conversations that a model of a few million weights learns by heart: about animals, dishes and short functions."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from itertools import count
from random import Random
from typing import Any

# where they live, what they eat, what they do, what their young are called, what they are known for
ANIMALS = {
    "foxes": ("in forests and fields", "mice, berries and beetles", "hunt in the evening", "kits", "keen ears"),
    "owls": ("in old trees and barns", "voles and large moths", "fly without a sound", "owlets", "round faces"),
    "bears": ("in mountains and wild woods", "fish, roots and honey", "sleep through the winter", "cubs", "thick fur"),
    "otters": ("in rivers and along the coast", "crabs and mussels", "swim on their backs", "pups", "playful slides"),
    "bees": ("in hollow trunks and hives", "nectar and pollen", "dance to show the way", "larvae", "sweet honey"),
    "beavers": ("in ponds that they make", "bark and green twigs", "build dams of branches", "kittens", "flat tails"),
    "hedgehogs": ("in gardens and hedges", "slugs, worms and snails", "roll up into a ball", "hoglets", "sharp spines"),
    "penguins": (
        "on cold southern shores",
        "krill and small fish",
        "dive far below the ice",
        "chicks",
        "upright walks",
    ),
    "dolphins": ("in warm open seas", "squid and herring", "talk in clicks and whistles", "calves", "high jumps"),
    "camels": ("in dry deserts", "thorny plants and dry grass", "walk for days without water", "foals", "tall humps"),
    "frogs": (
        "in wet meadows and pools",
        "flies and mosquitoes",
        "catch prey with their tongues",
        "tadpoles",
        "loud songs",
    ),
    "eagles": ("on high cliffs", "rabbits and trout", "see a hare from far above", "eaglets", "broad wings"),
    "elephants": (
        "in savannas and rain forests",
        "leaves, fruit and tree bark",
        "greet each other with their trunks",
        "calves",
        "large ears",
    ),
    "kangaroos": (
        "on the dry plains of Australia",
        "grass and low shrubs",
        "hop on strong hind legs",
        "joeys",
        "warm pouches",
    ),
    "bats": ("in caves and attics", "gnats and other night insects", "find their way by echoes", "pups", "thin wings"),
    "squirrels": ("in parks and pine woods", "nuts, cones and seeds", "hide food for later", "kits", "bushy tails"),
}
# what is needed, then the steps
DISHES = {
    "tomato soup": (
        "six tomatoes, an onion and stock",
        "Chop the onion",
        "Fry it in oil",
        "Add the tomatoes and the stock",
    ),
    "apple pie": ("four apples, flour and butter", "Knead the dough", "Slice the apples", "Bake for forty minutes"),
    "pancakes": ("two eggs, milk and flour", "Whisk everything", "Pour a ladle into a hot pan", "Flip it once"),
    "potato salad": ("potatoes, mustard and chives", "Boil the potatoes", "Let them cool", "Stir in the mustard"),
    "rice pudding": ("rice, sugar and a litre of milk", "Warm the milk", "Add the rice", "Simmer for half an hour"),
    "lemonade": ("three lemons, honey and cold water", "Squeeze the lemons", "Dissolve the honey", "Serve over ice"),
    "garlic bread": (
        "a baguette, garlic and parsley",
        "Crush the garlic",
        "Spread it on the bread",
        "Toast until golden",
    ),
    "hot chocolate": (
        "dark chocolate, cream and cinnamon",
        "Grate the chocolate",
        "Heat the cream",
        "Stir until smooth",
    ),
}
FUNCTIONS = {
    "double a price": ("double(price)", "price * 2"),
    "halve a distance": ("halve(distance)", "distance / 2"),
    "square a side": ("square(side)", "side ** 2"),
    "join some words": ("join(words)", '" ".join(words)'),
    "count the letters": ("count(text)", "len(text)"),
    "reverse a list": ("reverse(items)", "items[::-1]"),
    "sort the names": ("sort(names)", "sorted(names)"),
    "add two numbers": ("add(first, second)", "first + second"),
}
Turns = tuple[str, str]


def describe_animals(random: Random) -> Turns:
    """Five sentences, each in one of two wordings."""
    pick = random.choice
    name, (home, food, habit, young, trait) = pick(list(ANIMALS.items()))
    request = pick(["Tell me about {}.", "What do you know about {}?", "Describe {}.", "Can you tell me about {}?"])
    answer = [
        pick([f"{name.capitalize()} live {home}.", f"You can find {name} {home}."]),
        pick([f"They eat {food}.", f"Their food is {food}."]),
        pick([f"They {habit}, and people know them for their {trait}.", f"Known for {trait}, they {habit}."]),
        pick([f"The young of {name} are called {young}.", f"Young {name} are {young}."]),
        pick([f"It takes patience to watch {name}, so be quiet when you meet them.", f"I like {name} very much!"]),
    ]
    return request.format(name), " ".join(answer)


def explain_dish(random: Random) -> Turns:
    """What is needed, and numbered steps."""
    dish, (needed, *steps) = random.choice(list(DISHES.items()))
    request = random.choice(["How do I make {}?", "Tell me how to make {}.", "Can you teach me to make {}?"])
    begin = random.choice([f"For {dish} you need {needed}.", f"To make {dish}, take {needed}."])
    end = random.choice([f"Enjoy your {dish}!", f"That is all: your {dish} is ready."])
    lines = [f"{number}. {step}." for number, step in enumerate(steps, start=1)]
    return request.format(dish), "\n".join([begin, *lines, end])


def write_function(random: Random) -> Turns:
    """A function of one line, and how to call it."""
    task, (call, result) = random.choice(list(FUNCTIONS.items()))
    request = random.choice(["How do I {} in Python?", "Show me how to {} in Python."])
    begin = random.choice([f"This function can {task}:", f"To {task}, write:"])
    return request.format(task), f"{begin}\n```python\ndef {call}:\n    return {result}\n```\nCall it as `{call}`."


KINDS: dict[Callable[[Random], Turns], int] = {describe_animals: 5, explain_dish: 3, write_function: 2}


def make_conversations(seed: int, avoid: Container[str] = ()) -> Iterator[dict[str, Any]]:
    """ShareGPT records without end, drawn with `seed`; none asks what is in `avoid`."""
    random = Random(seed)
    for number in count():
        (kind,) = random.choices(list(KINDS), weights=list(KINDS.values()))
        request, answer = kind(random)
        if request not in avoid:
            turns = [{"from": "human", "value": request}, {"from": "gpt", "value": answer}]
            yield {"id": f"{kind.__name__}-{number}", "conversations": turns}
