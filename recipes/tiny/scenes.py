"""Small pictures of coloured shapes on a plain background, which tiny models learn to see."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from PIL import Image, ImageDraw

PATCH, SIDE = 12, 5  # pixels of a patch, and patches of a picture's side: every second one may hold a shape
FINE = 4  # a picture is drawn so many times larger, for smooth edges
COLOURS = {
    "red": (225, 45, 45),
    "green": (40, 170, 70),
    "blue": (45, 85, 235),
    "yellow": (245, 220, 50),
    "purple": (150, 50, 190),
    "orange": (250, 140, 30),
}
BACKGROUNDS = {"white": (250, 250, 250), "grey": (128, 128, 128), "black": (10, 10, 10)}
SHAPES = ("circle", "square", "triangle", "cross")
SIZES = {"small": 6, "large": 10}  # pixels
PLACES = {
    (0, 0): "at the top left",
    (0, 1): "at the top",
    (0, 2): "at the top right",
    (1, 0): "on the left",
    (1, 1): "in the centre",
    (1, 2): "on the right",
    (2, 0): "at the bottom left",
    (2, 1): "at the bottom",
    (2, 2): "at the bottom right",
}


class Thing(NamedTuple):
    """A shape in a picture: row and column of nine places, and by how many pixels it stands off the middle of its."""

    row: int
    column: int
    size: str
    colour: str
    shape: str
    shift: tuple[int, int]

    @property
    def name(self) -> str:
        """Its colour and shape, by which it is the only one of its scene."""
        return f"{self.colour} {self.shape}"

    @property
    def place(self) -> str:
        """Where it is, in words."""
        return PLACES[self.row, self.column]


class Scene(NamedTuple):
    """One to three shapes, from the top left to the bottom right, and the colour behind them."""

    things: tuple[Thing, ...]
    background: str


def draw_scene(random: Random) -> Scene:
    """A random scene, in which no two shapes have both colour and form in common."""
    count = random.choice((1, 2, 2, 3, 3))
    names = random.sample([(colour, shape) for colour in COLOURS for shape in SHAPES], count)
    things = []
    for place, (colour, shape) in zip(sorted(random.sample(list(PLACES), count)), names, strict=True):
        shift = (random.randint(-1, 1), random.randint(-1, 1))
        things.append(Thing(*place, random.choice(list(SIZES)), colour, shape, shift))
    return Scene(tuple(things), random.choice(list(BACKGROUNDS)))


def paint(scene: Scene) -> Image.Image:
    """The picture of a scene, `PATCH` * `SIDE` pixels wide and high."""
    side = PATCH * SIDE
    image = Image.new("RGB", (FINE * side, FINE * side), BACKGROUNDS[scene.background])
    draw = ImageDraw.Draw(image)
    for thing in scene.things:
        x, y = (
            FINE * (PATCH * (2 * place + 0.5) + shift)
            for place, shift in zip((thing.column, thing.row), thing.shift, strict=True)
        )
        paint_shape(draw, thing.shape, x, y, FINE * SIZES[thing.size] / 2, COLOURS[thing.colour])
    return image.resize((side, side), Image.Resampling.BOX)


def paint_shape(
    draw: ImageDraw.ImageDraw, shape: str, x: float, y: float, radius: float, colour: tuple[int, int, int]
) -> None:
    """Fill a shape around a point; a radius is half of its width."""
    box = (x - radius, y - radius, x + radius, y + radius)
    if shape == "circle":
        draw.ellipse(box, fill=colour)
    elif shape == "square":
        draw.rectangle(box, fill=colour)
    elif shape == "triangle":
        draw.polygon([(x, y - radius), (x + radius, y + radius), (x - radius, y + radius)], fill=colour)
    else:
        arm = radius / 3
        draw.rectangle((x - radius, y - arm, x + radius, y + arm), fill=colour)
        draw.rectangle((x - arm, y - radius, x + arm, y + radius), fill=colour)
