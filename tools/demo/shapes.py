"""Pictures of one or two shapes and sentences about them, the training data of the vision demo."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

SIDE = 48  # pixels
COLOURS = {
    "red": (215, 40, 40),
    "green": (40, 165, 60),
    "blue": (45, 80, 220),
    "yellow": (235, 215, 45),
    "purple": (150, 55, 185),
    "orange": (240, 135, 35),
}
SHAPES = "circle", "square", "triangle"
PLACES = "top left", "top right", "bottom left", "bottom right"
UNSEEN = 50_000_000  # The first seed of new pictures; the trainer uses smaller seeds.
TWO = 0.7  # share of pictures with two shapes
Shape = tuple[str, str, str]  # colour, shape, place
_Y, _X = np.mgrid[:SIDE, :SIDE].astype(np.float32) + 0.5


@dataclass(frozen=True, slots=True)
class Scene:
    """The shapes of a picture as (colour, shape, place)."""

    shapes: tuple[Shape, ...]

    @property
    def sentence(self) -> str:
        parts = [
            f"{_article(colour)} {colour} {shape} in the {place}" for colour, shape, place in self.shapes
        ]
        return " and ".join(parts) + "."


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def is_held_out(shape: Shape) -> bool:
    """Return whether training never draws this shape. For each form and place, one of six colours is held
    out, so 12 of 72 shapes are held out. Training draws each pair of a colour, a form and a place."""
    colour, form, place = ([*COLOURS].index(shape[0]), SHAPES.index(shape[1]), PLACES.index(shape[2]))
    return (colour + 2 * form + place) % len(COLOURS) == 0


def random_scene(rng: random.Random) -> Scene:
    places = sorted(rng.sample(range(len(PLACES)), 2 if rng.random() < TWO else 1))
    return Scene(tuple((rng.choice([*COLOURS]), rng.choice(SHAPES), PLACES[place]) for place in places))


def training_scene(rng: random.Random) -> Scene:
    while any(map(is_held_out, (scene := random_scene(rng)).shapes)):
        pass
    return scene


def new_picture(number: int, held_out: bool = False) -> tuple[np.ndarray, Scene]:
    """Return the pixels and the scene of a picture that training never draws. With `held_out`, all its shapes
    are held out."""
    rng = random.Random(UNSEEN + number)
    scene = random_scene(rng)
    while held_out and not all(map(is_held_out, scene.shapes)):
        scene = random_scene(rng)
    return draw(scene, np.random.default_rng(UNSEEN + number)), scene


def draw(scene: Scene, rng: np.random.Generator) -> np.ndarray:
    """Return pixels u8 [SIDE, SIDE, 3]: shapes of random size and shade on a grey background, with noise."""
    pixels = np.empty((SIDE, SIDE, 3), np.float32)
    pixels[:] = rng.uniform(10, 245) + rng.uniform(-10, 10, 3)
    for colour, shape, place in scene.shapes:
        radius, quarter = rng.uniform(7.5, 10.2), SIDE / 4
        room = quarter - 1 - radius
        y = (1 if place.startswith("top") else 3) * quarter + rng.uniform(-room, room)
        x = (1 if place.endswith("left") else 3) * quarter + rng.uniform(-room, room)
        pixels[_inside(shape, _X - x, _Y - y, radius)] = COLOURS[colour] + rng.uniform(-15, 15, 3)
    pixels += rng.normal(0, rng.uniform(0, 6), pixels.shape).astype(np.float32)
    return pixels.round().clip(0, 255).astype(np.uint8)


def _inside(shape: str, x: np.ndarray, y: np.ndarray, radius: float) -> np.ndarray:
    if shape == "circle":
        return x * x + y * y < radius * radius
    if shape == "square":
        return np.maximum(np.abs(x), np.abs(y)) < 0.88 * radius
    return (np.abs(y) < radius) & (2 * np.abs(x) < y + radius)
