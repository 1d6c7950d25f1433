"""Small pictures of coloured shapes on a plain background, which tiny models learn to see."""

from __future__ import annotations

from itertools import product
from random import Random
from typing import NamedTuple

from PIL import Image, ImageDraw

PATCH = 12  # pixels
SIDE = 5  # patches
# A picture is painted this many times larger.
FINE = 4
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
    """A shape in one of nine places of a picture."""

    row: int
    column: int
    size: str
    colour: str
    shape: str
    shift: tuple[int, int]  # pixels from the middle of its place

    @property
    def name(self) -> str:
        """Return colour and shape, which no other shape of the scene has both."""
        return f"{self.colour} {self.shape}"

    @property
    def place(self) -> str:
        """Return the place in words."""
        return PLACES[self.row, self.column]


class Scene(NamedTuple):
    """One to three shapes, from the top left to the bottom right, and the colour behind them."""

    things: tuple[Thing, ...]
    background: str


def draw_scene(random: Random) -> Scene:
    """Return a random scene, in which no two shapes have both colour and form in common."""
    count = random.choice((1, 2, 2, 3, 3))
    names = random.sample(list(product(COLOURS, SHAPES)), count)
    places = sorted(random.sample(list(PLACES), count))
    things = []
    for (row, column), (colour, shape) in zip(places, names, strict=True):
        shift = (random.randint(-1, 1), random.randint(-1, 1))
        size = random.choice(list(SIZES))
        things.append(Thing(row, column, size=size, colour=colour, shape=shape, shift=shift))
    return Scene(tuple(things), random.choice(list(BACKGROUNDS)))


def paint(scene: Scene) -> Image.Image:
    """Return the picture of a scene, `PATCH` * `SIDE` pixels wide and high."""
    side = PATCH * SIDE
    image = Image.new("RGB", (FINE * side, FINE * side), BACKGROUNDS[scene.background])
    draw = ImageDraw.Draw(image)
    for thing in scene.things:
        # Every second patch may hold a shape, around its middle.
        x = FINE * (PATCH * (2 * thing.column + 0.5) + thing.shift[0])
        y = FINE * (PATCH * (2 * thing.row + 0.5) + thing.shift[1])
        radius = FINE * SIZES[thing.size] / 2
        paint_shape(draw, thing.shape, x, y, radius=radius, colour=COLOURS[thing.colour])
    # Averaging blocks of pixels gives smooth edges.
    return image.resize((side, side), Image.Resampling.BOX)


def paint_shape(
    draw: ImageDraw.ImageDraw,
    shape: str,
    x: float,
    y: float,
    radius: float,
    colour: tuple[int, int, int],
) -> None:
    """Fill a shape around a point; its width is twice the radius."""
    left = x - radius
    right = x + radius
    top = y - radius
    bottom = y + radius
    if shape == "circle":
        draw.ellipse((left, top, right, bottom), fill=colour)
    elif shape == "square":
        draw.rectangle((left, top, right, bottom), fill=colour)
    elif shape == "triangle":
        draw.polygon([(x, top), (right, bottom), (left, bottom)], fill=colour)
    else:
        arm = radius / 3
        draw.rectangle((left, y - arm, right, y + arm), fill=colour)
        draw.rectangle((x - arm, top, x + arm, bottom), fill=colour)
