"""A grammar that generates short stories, the only training data of the demo model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import TypeVar

# Each line of a block is an alternative. The first alternative is twice as likely as any other. If odds were
# equal, rounding would decide the greedy token, so texts would differ between devices.
# Placeholders (capitals begin a sentence):
# - h, k: the hero's name and kind
# - s/S, o, p/P: the hero's pronouns
# - a, t: the thing, with "a" and with "the"
# - f/F, fs, fp: the friend and its pronouns
# - nf: the friend when the hero meets it
# - home, thome: the home, with "a" and with "the"
# - most: the superlative of the trait

NAMES = {
    "she": "Mia Lily Rosa Nora Ella Ivy Ruby Clara Zoe Hazel Poppy Daisy Anna Emma Luna Sara Olive Willa",
    "he": "Tom Ben Sam Leo Max Finn Hugo Otto Oscar Milo Theo Jasper Jack Noah Felix Arlo Pip Emil",
}
ONSETS = "b c d f g h k l m n p r s t v w y z bl br dr fl gr st th tr".split()
CODAS = ["", "", "", "", "", "", "", "", "l", "n", "r", "s", "x"]
PRONOUNS = {"she": ("she", "her", "her"), "he": ("he", "him", "his")}
CHILDREN = {"she": "girl", "he": "boy"}
ANIMALS = "mouse fox rabbit bear squirrel kitten duckling hedgehog puppy otter"
MOODS = "small old young sleepy lonely grumpy polite little"
TRAITS = {
    "kind": "kindest",
    "brave": "bravest",
    "clever": "cleverest",
    "gentle": "gentlest",
    "wise": "wisest",
    "merry": "merriest",
    "bold": "boldest",
}
HOMES = """
a white house by the sea
a village below the mountains
a mill beside the river
a cottage near the forest
a barn on a green hill
a lighthouse on the rocky shore
a tiny house under an oak tree
a house boat on the lake
"""
FRIENDS = {  # friend -> gift
    "owl": "a soft feather",
    "hedgehog": "a red apple",
    "frog": "a white water lily",
    "turtle": "a pearly shell",
    "squirrel": "a golden acorn",
    "fox": "a bunch of wild mint",
    "bear": "a pot of honey",
    "crow": "a shiny button",
    "beaver": "a carved spoon",
    "goat": "a ball of wool",
    "mouse": "a tiny piece of cheese",
    "badger": "a smooth blue stone",
}
# A quest has a thing and its short name, two troubles of the friend, and two ways in which the thing helps.
QUESTS = """
a small brass lantern: lantern
It was growing dark, and {f} was afraid to walk home alone.
{F} could not find the way home, because the sun had gone down.
{h} lit the lantern and held it high, and together they walked home along the bright path.
So {h} lit the lantern, and its warm light showed them the way to {fp} door.

a big yellow umbrella: umbrella
Rain began to fall, and {f} had nowhere to hide.
Dark clouds had come, and {f} was wet from nose to tail.
{h} opened the umbrella, and they sat under it side by side until the rain was over.
Quickly {h} opened the umbrella, and under it they stayed dry and told each other jokes.

a long strong rope: rope
{F} had fallen into a deep hole and could not climb out.
{F} was stuck in the mud and could not move a single foot.
{h} tied the rope to a tree and threw down the other end, and soon {f} was free.
{F} held one end of the rope, and {h} pulled and pulled, until {fs} was free.

an old silver key: key
{F} stood in front of a little green door that would not open.
{F} had a wooden box full of songs, but the box was locked.
{h} put the key into the lock and turned it twice, and with a soft click it opened.
The key was just the right size. {h} turned it slowly, and there was a happy little click.

a warm woolen blanket: blanket
{F} was shivering in the cold wind.
Snow had fallen in the night, and {f} was as cold as ice.
{h} put the blanket around {f}, and soon {fs} was as warm as toast.
They sat down under the blanket together, and {f} stopped shivering and began to smile.

a little copper bell: bell
A thick fog had come, and {f} had lost {fp} family.
{F} was calling for {fp} brother, but {fp} voice was too small.
{h} rang the bell again and again, until a happy voice answered out of the white fog.
{h} rang the bell as loud as {s} could, and soon the whole family came running.

a small wooden boat: boat
{F} wanted to visit {fp} grandmother, but the river was too wide to swim.
{F} was sitting on a rock in the lake, and the water was too deep.
{h} pushed the boat into the water and rowed {f} safely to the other side.
They climbed into the boat, and {h} rowed slowly over the water until they reached the shore.

an old paper map: map
{F} had been walking in circles all day and was quite lost.
{F} did not know which of the three roads to take.
{h} opened the map, turned it around twice, and found the right road at last.
They looked at the map together, and {h} showed {f} the right way past the mill.

a needle with blue thread: needle
The wind had torn the sail of {fp} little ship.
{F} was sad, because there was a big hole in {fp} best coat.
{h} took the needle and sewed it up with tiny blue stitches, until it was as good as new.
The needle went in and out, in and out, and {h} did not stop until the hole was gone.

a bag of flower seeds: seeds
{F} was sad, because {fp} garden was bare and gray.
{F} wished for flowers, but nothing grew in {fp} garden.
They planted the seeds in neat rows, and after a week the whole garden was full of flowers.
{h} planted the seeds and gave them water, and soon the first red flower opened.

a painted wooden flute: flute
{F} was too sad to dance at the summer party.
{F} could not fall asleep, because the night was too quiet.
{h} played a merry song on the flute, and soon {f} was humming along.
{h} played the flute so sweetly that even the stars listened, and {f} felt much better.

a fresh loaf of bread: bread
{F} had not eaten anything since yesterday.
{F} was so hungry that {fp} tummy growled like thunder.
{h} broke the bread in two and gave {f} the bigger half.
They sat down in the grass and shared the bread, and not one crumb was left.

a tall wooden ladder: ladder
{F} had a red kite, but it was stuck at the top of a tree.
{F} wanted to pick a pear, but the branch was much too high.
{h} leaned the ladder against the tree, climbed to the very top, and brought it down.
{F} held the ladder, and {h} climbed up and up until {s} could reach it.

a good straw broom: broom
So many leaves had fallen that {f} could not open {fp} door.
{F} was sad, because a storm had filled {fp} house with sand.
{h} took the broom and swept and swept, until everything was clean and bright.
{h} swept with the broom, {f} sang a song, and before noon all the work was done.

a blue tin bucket: bucket
It had not rained for weeks, and the apple tree of {f} was thirsty.
There was a hole in the roof, and water was dripping on the bed of {f}.
{h} filled the bucket and emptied it, ten times in all, and then everything was fine.
With the bucket {h} ran back and forth until the trouble was over.

a shiny telescope: telescope
{F} was waiting for a ship, but could not see so far.
{F} was looking for {fp} little sister, who had run off to play.
{h} looked through the telescope, far and wide, and laughed when {s} saw somebody wave.
{h} climbed up high and looked through the telescope, first left, then right, and there it was!
"""
# A beat (a step of the story) with "?" is left out at random, or if the story is too long.
BEATS = """
Once upon a time, there was a {trait} little {k} named {h}. {S} lived in {home}.
Once upon a time, in {home}, there lived a {trait} little {k} named {h}.
Once upon a time, a {trait} little {k} named {h} lived in {home}.
Once upon a time there lived a {trait} little {k}. {P} name was {h}, and {p} home was {home}.
{h} was a {trait} little {k} who lived in {home}.
There was once a {trait} little {k} named {h}, and {s} lived in {home}.
Long ago, in {home}, there lived a little {k} named {h}. Everyone knew that {s} was very {trait}.

One sunny morning,
One windy morning,
One spring morning,
One quiet morning,
One summer day,
One day,

{h} found {a} under a bush.
{h} found {a} in the tall grass.
{h} found {a} beside the road.
{h} looked behind the old gate and found {a}.
{h} looked under the stairs and found {a}.
{p} grandmother gave {h} {a}. "Take good care of it," said Grandmother.
{h} went to the market and bought {a} for one shiny coin.

?"What a lovely thing!" said {h}. "I will take it with me."
?"How nice!" said {h}. "I wonder what it is good for."
?"I am sure this will be useful," thought {h}.
?{S} was so happy that {s} danced around in a circle.

Then {s} went
{h} took {t} and walked
With {t}, {s} walked

through the singing forest.
along the sparkling river.
over the windy hill.
across the green meadow.
down the long and dusty road.
past the golden fields.

By the old bridge,
Near the round pond,
Next to a hollow tree,
Beside the stone well,
On a mossy rock,
At the crooked fence,

{s} met {nf}.
{s} saw {nf}.
there sat {nf}.

?"Good morning, little {k}," said {f}.
?"What is the matter?" asked {h}.
?"Hello! Why do you look so sad?" asked {h}.

{trouble}

?"Please, can you help me?" asked {f}.
?"Oh dear," said {f}, "what shall I do?"
?{F} sighed, and a tear ran down {fp} cheek.

"Do not worry," said {h}. "I have {a}!"
At first {h} did not know what to do. Then {s} remembered {t}!
"Wait," said {h}, "I know what to do!" {S} still had {t}.
{h} thought and thought. Then {s} looked at {t} and smiled.

{deed}

"Thank you, {h}!" said {f}. "You are the {most} {k} I have ever met."
"Thank you, dear {h}," said {f}. "You are the {most} {k} in the whole world."
"You are the {most} {k} of all," said {f}, and gave {h} a big hug.

?To say thank you, {f} gave {h} {gift}.
?Then {f} gave {o} {gift}, and they had tea together.

?In the evening, {h} went back to {thome} and told everyone about {f}.
?When the moon came up, {h} was back in {thome}, tired and happy.
?Then {h} went home to {thome}, and {s} sang all the way.

From that day on, {h} and {f} were the best of friends.
And whenever {h} saw {t}, {s} thought of {f} and smiled.
That night, {h} put {t} next to {p} bed and dreamed of {f}.
{h} never forgot that a {trait} heart can make a new friend.

?The end.
"""
WORDS_MIN, WORDS_MAX = 60, 150


@dataclass(frozen=True, slots=True)
class Story:
    """A story and its facts, which tests look for in the text."""

    text: str
    hero: str
    kind: str
    pronoun: str
    thing: str
    friend: str
    home: str


T = TypeVar("T")


@cache
def _groups(block: str) -> list[list[str]]:
    return [group.splitlines() for group in block.strip().split("\n\n")]


def _choose(rng: random.Random, alternatives: Sequence[T]) -> T:
    return rng.choices(alternatives, [2] + [1] * (len(alternatives) - 1))[0]


def _invent_name(rng: random.Random) -> str:
    syllables = (rng.choice(ONSETS) + rng.choice("aaeioou") + rng.choice(CODAS) for _ in range(3))
    return "".join(islice(syllables, rng.choice((2, 2, 3)))).capitalize()


def _definite(phrase: str) -> str:
    return "the " + phrase.split(" ", 1)[1]


def tell_story(rng: random.Random) -> Story:
    """Return a story of 60 to 150 words in ASCII.

    A quarter of the heroes have invented names, so the model learns to copy unknown names.
    """
    pronoun = _choose(rng, ("she", "he"))
    s, o, p = PRONOUNS[pronoun]
    hero = _invent_name(rng) if rng.random() < 0.25 else _choose(rng, NAMES[pronoun].split())
    kind = CHILDREN[pronoun] if rng.random() < 0.4 else _choose(rng, ANIMALS.split())
    friend = _choose(rng, [name for name in FRIENDS if name != kind])
    fs, _, fp = PRONOUNS[_choose(rng, ("she", "he"))]
    mood, home, trait = (
        _choose(rng, MOODS.split()),
        _choose(rng, _groups(HOMES)[0]),
        _choose(rng, list(TRAITS)),
    )
    things, *lines = _choose(rng, _groups(QUESTS))
    thing, short = things.split(": ")
    fill = {
        "h": hero, "k": kind, "s": s, "o": o, "p": p, "S": s.capitalize(), "P": p.capitalize(),
        "a": thing, "t": f"the {short}", "f": f"the {friend}", "F": f"The {friend}", "fs": fs, "fp": fp,
        "nf": f"{'an' if mood[0] in 'aeiou' else 'a'} {mood} {friend}", "gift": FRIENDS[friend],
        "home": home, "thome": _definite(home), "trait": trait, "most": TRAITS[trait],
    }  # fmt: skip
    fill["trouble"] = _choose(rng, lines[:2]).format(**fill)
    fill["deed"] = _choose(rng, lines[2:]).format(**fill)
    beats = [_choose(rng, alternatives) for alternatives in _groups(BEATS)]
    beats = [line for line in beats if not line.startswith("?") or rng.random() < 0.6]
    while True:
        text = " ".join(line.removeprefix("?").format(**fill) for line in beats)
        if len(text.split()) <= WORDS_MAX:
            return Story(text, hero, kind, pronoun, short, friend, home)
        beats.remove(rng.choice([line for line in beats if line.startswith("?")]))
