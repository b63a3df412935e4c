"""The node "ToMA: Merge Map": which tokens merged into which, drawn over the picture."""

from __future__ import annotations

from typing import Any

import torch
from comfy_api.latest import io
from PIL import Image, ImageDraw
from torch import Tensor

from .drawing import ACCENT, INK, PAPER, font, to_picture, to_tensor
from .options import KEY
from .record import MAP_NODE, RECORD, Recording, Shot, origin
from .toma import CATEGORY

SIDE = 1024
"""Pixels of the longer side of a map, or a little less: a token is a whole number of pixels."""
LEGEND = 64
TINT = 0.6
"""Share of its group's colour in that of a merged token."""


def find_shot(record: Recording, block: int, step: int) -> tuple[Shot, str]:
    """The choice to draw, and what it is in words.

    Args:
        record: of the run.
        block: index of the group of blocks among those that merged.
        step: of the run, from 0.

    Raises:
        ValueError: there is no such choice; the message says why and what to do.
    """
    if not record.steps:
        raise ValueError(
            "nothing was recorded: the sampler ran before this node was in the graph, or it "
            "sampled another model. Connect the model that goes into the sampler, change the "
            "sampler's seed and run again."
        )
    # A sampler whose result came from ComfyUI's cache did not run, and so is not the latest.
    if not record.origin.items() <= origin().items():
        raise ValueError(
            "the latest run with this model made another picture than the one connected here. "
            "Change the seed of this picture's sampler and run again; where several samplers "
            "share the model, give each a ToMA node of its own."
        )
    places = record.places
    if not places:
        raise ValueError("no tokens merged in the last run. The text on the ToMA node says why.")
    if not 0 <= block < len(places):
        raise ValueError(
            f"block must be from 0 to {len(places) - 1}, got {block}: blocks that share a "
            f"choice of tokens count as one, and {len(places)} merged. Set it to one of them."
        )
    if step >= record.steps:
        raise ValueError(
            f"step must be from 0 to {record.steps - 1}, the steps of the last run, got {step}. "
            "Set it to one of them."
        )
    shot = record.shot(places[block], step)
    if shot is None:
        merging = [step for step in sorted(record.merging) if record.shot(places[block], step)]
        raise ValueError(
            f"block {block} merged nothing at step {step} of {record.steps}: tokens merge at steps "
            f"{merging[0]} to {merging[-1]}. Set step to one of them."
        )
    rows, columns = shot.grid
    title = (
        f"block {block} of 0-{len(places) - 1} ({shot.block}), step {step} of 0-{record.steps - 1}"
        f": {rows * columns} -> {len(shot.kept)} tokens"
    )
    is_whole = shot.whole_step == step
    return shot, title + (" from the next step on; this one runs whole" if is_whole else "")


def draw_map(picture: Image.Image, shot: Shot, title: str) -> Image.Image:
    """The groups of a choice over the picture, with a legend below.

    A token that stands alone shows the picture. One that merged is tinted with the mean colour of
    its group, and a line leads to the token that the group merged into, which has a dot. Borders
    run around groups.
    """
    rows, columns = shot.grid
    cell = max(4, SIDE // max(rows, columns))
    width, height = columns * cell, rows * cell
    follows = shot.follows.long()
    sizes = follows.bincount(minlength=rows * columns)
    merged = sizes[follows] > 1
    picture = picture.resize((width, height), Image.Resampling.LANCZOS)
    colours = to_tensor(picture.resize((columns, rows), Image.Resampling.BOX)).view(-1, 3)
    sums = torch.zeros(rows * columns, 3).index_add(0, follows, colours)
    groups = (sums / sizes.clamp_min(1)[:, None])[follows].view(rows, columns, 3)
    tinted = to_picture(groups).resize((width, height), Image.Resampling.NEAREST)
    share = to_picture((TINT * merged.float()).view(rows, columns, 1).expand(-1, -1, 3))
    share = share.convert("L").resize((width, height), Image.Resampling.NEAREST)
    canvas = Image.new("RGB", (width, height + LEGEND), PAPER)
    canvas.paste(Image.composite(tinted, picture, share))
    draw = ImageDraw.Draw(canvas)
    _draw_borders(draw, follows.view(rows, columns), merged.view(rows, columns), cell)

    def centre(token: int) -> tuple[float, float]:
        row, column = divmod(token, columns)
        return (column + 0.5) * cell, (row + 0.5) * cell

    for token, kept in enumerate(follows.tolist()):
        if token != kept:
            draw.line((*centre(token), *centre(kept)), PAPER, max(1, cell // 12))
    for token in shot.kept.tolist():
        if sizes[token] > 1:
            _draw_dot(draw, centre(token), cell)
    _draw_legend(draw, height, width, title)
    return canvas


def _draw_borders(draw: ImageDraw.ImageDraw, groups: Tensor, merged: Tensor, cell: int) -> None:
    """Lines between neighbours of different groups, one of which at least has merged."""
    beside = (groups[:, 1:] != groups[:, :-1]) & (merged[:, 1:] | merged[:, :-1])
    for row, column in beside.nonzero().tolist():
        x, y = (column + 1) * cell, row * cell
        draw.line((x, y, x, y + cell), INK)
    below = (groups[1:] != groups[:-1]) & (merged[1:] | merged[:-1])
    for row, column in below.nonzero().tolist():
        x, y = column * cell, (row + 1) * cell
        draw.line((x, y, x + cell, y), INK)


def _draw_dot(draw: ImageDraw.ImageDraw, centre: tuple[float, float], cell: int) -> None:
    x, y = centre
    radius = max(2, cell / 5)
    draw.ellipse((x - radius, y - radius, x + radius, y + radius), ACCENT, PAPER)


def _draw_legend(draw: ImageDraw.ImageDraw, top: int, width: int, title: str) -> None:
    size = min(20, max(10, width // 48))
    first, second = top + LEGEND // 4 + 2, top + 3 * LEGEND // 4 - 2
    draw.text((8, first), title, INK, font(size), "lm")
    _draw_dot(draw, (8 + size / 2, second), 2 * size)
    text = "others merge into it, along the lines; without a dot or a line: not merged"
    draw.text((12 + size, second), text, INK, font(size), "lm")


class ToMAMergeMap(io.ComfyNode):
    """Shows which tokens merged in the run that made a picture."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id=MAP_NODE,
            display_name="ToMA: Merge Map",
            category=CATEGORY,
            description="Draws over the finished picture which of its tokens were merged into "
            "which, for a block and a step.",
            inputs=[
                io.Model.Input(
                    "model", tooltip="The model that goes into the sampler, from a ToMA node."
                ),
                io.Image.Input("image", tooltip="The picture that was sampled with it, decoded."),
                io.Int.Input(
                    "block",
                    default=0,
                    min=0,
                    max=999,
                    tooltip="Which blocks of the model, counted from 0 in the order in which they "
                    "run; blocks that share a choice of tokens count as one.",
                ),
                io.Int.Input(
                    "step",
                    default=0,
                    min=0,
                    max=9999,
                    tooltip="Which sampling step, counted from 0. The choice of tokens in force at "
                    "that step is drawn.",
                ),
            ],
            outputs=[
                io.Image.Output(
                    tooltip="The first picture, with dots, lines and borders for what merged, and "
                    "a legend."
                )
            ],
        )

    @classmethod
    def execute(cls, model: Any, image: Tensor, block: int, step: int) -> io.NodeOutput:
        options = model.model_options.get("transformer_options", {})
        if not options.get(KEY):
            raise ValueError(
                "this model merges nothing. Connect the model from a ToMA node with a ratio above "
                "0, the same that goes into the sampler."
            )
        shot, title = find_shot(options[RECORD], block, step)
        return io.NodeOutput(to_tensor(draw_map(to_picture(image[0]), shot, title)))
