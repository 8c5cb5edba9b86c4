"""Throw-away heads of the painter's draw stage: what its text model has to know, told at every position."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from visspec.toys.world.palette import CLASSES, COLOURS
from visspec.toys.world.scene import ShapeScene
from visspec.toys.world.suite import NUMBERS, RELATIONS, Metadata, every, wanted

HUES = tuple(COLOURS)


class ProbeHeads(nn.Module):
    """Throw-away heads: what the prompt asks for and what of it is drawn, told from a middle layer at every position.

    From the codes' loss alone the text model takes very long to look at the prompt at all, and longer to see what is
    still to be drawn: few codes of a picture depend on it. These labels are dense. The slots of a prompt are the first
    and second class and colour, the relation and the number; 0 says that the prompt has none. Of the picture, they are
    whether the first and the second object have been begun, and how many shapes have. A later layer tells both
    together: class and colour of the shape that begins next; 0 where there is none.

    Colours and classes of a prompt would still be drawn in wrong pairs: the first code of a shape shows its colour, and
    its class is decided codes later. So the later layer also tells class and colour of the shape begun last while it is
    new, in its first row and a little more; an early one tells at a prompt's class which colour it goes with; and one
    head of attention is to look at the class of the new shape in the prompt.
    """

    tables: torch.Tensor  # (kinds, words) number of a word among those of a kind, from 1; 0 for others

    def __init__(self, width: int, words: dict[str, int], side: int):
        super().__init__()
        self.span = side + 2  # codes for which a shape is new
        plural = {row["include"][0]["class"]: row["prompt"].split()[-1] for row in every("counting")}
        kinds: list[list[tuple[str, ...]]] = [[(kind, plural[kind]) for kind in CLASSES]]
        kinds += [[(colour,) for colour in COLOURS]]
        kinds += [[(relation.split()[0],) for relation in RELATIONS], [(number,) for number in NUMBERS.values()]]
        tables = torch.zeros(len(kinds), len(words), dtype=torch.long)
        for table, names in zip(tables, kinds):
            for i, synonyms in enumerate(names):
                table[[words[word] for word in synonyms]] = i + 1
        self.register_buffer("tables", tables, persistent=False)
        self.slots = [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1), (3, 1)]  # (kind, which occurrence)
        self.heads = nn.ModuleList(nn.Linear(width, len(kinds[kind]) + 1) for kind, _ in self.slots)
        self.progress = nn.ModuleList(nn.Linear(width, n) for n in (2, 2, 1 + max(NUMBERS)))
        self.following = nn.ModuleList(nn.Linear(width, 1 + len(names)) for names in (CLASSES, COLOURS))
        self.told = nn.Linear(width, 1 + len(COLOURS))
        self.newest = nn.ModuleList(nn.Linear(width, 1 + len(names)) for names in (CLASSES, COLOURS))

    def labels(self, ids: torch.Tensor) -> list[torch.Tensor]:
        """One int64 (B,) a slot of prompts (B, prompt)."""
        found = self.tables[:, ids]
        count = (found > 0).cumsum(-1)
        return [(found[kind] * (count[kind] == which)).sum(-1) for kind, which in self.slots]

    def pairs(self, early: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Cross-entropy of the colours that stand before classes in prompts (B, prompt); layer (B, prompt, width)."""
        colours = self.tables[1][ids].roll(1, 1) * (self.tables[0][ids] > 0)
        colours = torch.where(colours > 0, colours, -100)
        losses = F.cross_entropy(self.told(early).float().transpose(1, 2), colours, reduction="sum")
        return losses / (colours > 0).sum().clamp_min(1)

    def forward(
        self,
        middle: torch.Tensor,
        later: torch.Tensor,
        looks: torch.Tensor,
        ids: torch.Tensor,
        asked: torch.Tensor,
        begun: torch.Tensor,
    ) -> torch.Tensor:
        """Summed cross-entropy of a picture's labels; layers (B, image tokens, width), looks (B, image tokens,
        prompt), begun as `progress` makes it. Rows not `asked` do not count for what a prompt says.
        """
        said = [label[:, None].expand(middle.shape[:2]) for label in self.labels(ids)]
        early, late = [*self.heads, *self.progress], [*self.following, *self.newest]
        layers = [middle] * len(early) + [later] * len(late)
        total = middle.new_zeros((), dtype=torch.float32)
        count = begun[..., 2]
        new = (count > F.pad(count, (self.span, 0))[:, : count.shape[1]]).float()
        for head, layer, label in zip(early + late, layers, [*said, *begun.unbind(-1)]):
            # how many shapes are begun is told without a prompt, too
            counted = torch.ones_like(asked) if head is self.progress[-1] else asked
            losses = F.cross_entropy(head(layer).float().transpose(1, 2), label, reduction="none")
            where = counted[:, None] * (new if head in self.newest else torch.ones_like(new))
            total = total + (losses * where).sum() / where.sum().clamp_min(1)
        there = (self.tables[0][ids][:, None] == begun[..., 5, None]) & (begun[..., 5, None] > 0)
        where = there.any(-1) * asked[:, None] * new
        losses = -(looks * there).sum(-1).float().clamp_min(1e-6).log()
        total = total + (losses * where).sum() / where.sum().clamp_min(1)
        return total


def progress(metadata: Metadata, scene: ShapeScene, shown: np.ndarray) -> np.ndarray:
    """Before each code, (side^2, 7) int8: whether the prompt's first and second object are begun, how many shapes are,
    class and colour (from 1) of the shape that begins next, 0 for none, and those of the shape begun last.

    A shape begins with its first code that is `shown`, bool (side, side).
    """
    side, starts = len(shown), []
    for s in scene.shapes:
        top, bottom, left, right = (int((at + r) * side) for at in (s.y, s.x) for r in (-s.radius, s.radius))
        box = np.zeros_like(shown)
        box[top : bottom + 1, left : right + 1] = shown[top : bottom + 1, left : right + 1]
        starts.append(int(box.argmax()))
    first = {shape.kind: start for shape, start in zip(scene.shapes, starts)}
    place, kinds = np.arange(shown.size), [kind for kind, _ in wanted(metadata)]
    begun = [place > first[kinds[k]] if k < len(kinds) else np.zeros_like(place) for k in (0, 1)]
    count = sum((place > start).astype(np.int8) for start in starts)
    following, newest = np.zeros((len(place), 2)), np.zeros((len(place), 2))
    order = sorted(
        (start, 1 + CLASSES.index(s.kind), 1 + HUES.index(s.colour)) for start, s in zip(starts, scene.shapes)
    )
    for start, *what in reversed(order):
        following[place <= start] = what
    for start, *what in order:
        newest[place > start] = what
    return np.column_stack([*begun, count, following, newest]).astype(np.int8)
