"""The node "ToMA: Merge Map": draws the plans of the run, and costs nothing where it is not."""

from __future__ import annotations

import copy
import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
from comfy_execution.utils import CurrentNodeContext
from comfyui_toma.nodes import record as recording
from comfyui_toma.nodes.attach import attach
from comfyui_toma.nodes.merge_map import ToMAMergeMap, draw_map
from comfyui_toma.nodes.record import RECORD, Recording, Shot
from comfyui_toma.toma_core.config import Matching, MergeConfig
from comfyui_toma.toma_core.session import Session
from PIL import Image

TOOLS = Path(__file__).parent.parent / "tools"
# At the end: ComfyUI has modules of its own that are named like some of these.
sys.path.append(str(TOOLS))

import demo  # noqa: E402
from graph import NODE, graph  # noqa: E402
from packages import Failed  # noqa: E402

MAP_GRAPH = {"1": {"class_type": "KSampler"}, "2": {"class_type": "ToMAMergeMap"}}
PICTURE = torch.rand(1, 64, 64, 3)


@pytest.fixture
def running(monkeypatch):
    """The graphs that ComfyUI's queue says are running; first one with the map."""
    graphs = {0: (0, "id", MAP_GRAPH, {}, [])}
    queue = SimpleNamespace(currently_running=graphs)
    instance = SimpleNamespace(client_id=None, prompt_queue=queue)
    server = SimpleNamespace(PromptServer=SimpleNamespace(instance=instance))
    monkeypatch.setitem(sys.modules, "server", server)
    return graphs


@pytest.fixture
def plans(monkeypatch):
    """Every new plan of a run, in the order in which they were made, with its place."""
    made = []
    original = Session.plan

    def plan(self, place, *args):
        held = original(self, place, *args)
        if held.is_new:
            made.append((place.block, held.plan))
        return held

    monkeypatch.setattr(Session, "plan", plan)
    return made


def record_of(model):
    return model.model_options["transformer_options"][RECORD]


SETTINGS = [
    (tiny.sdxl, MergeConfig(tile_size=4, reuse_interval=2)),
    (tiny.flux, MergeConfig(tile_size=4, reuse_interval=2, keep_detail=True)),
    (tiny.sdxl, MergeConfig(scope="attention", reuse_interval=2, matching=Matching(threshold=0.2))),
]


@pytest.mark.parametrize(("make", "config"), SETTINGS)
def test_the_record_is_what_the_plans_say(running, plans, make, config):
    model = attach(make(), config)
    # With kept detail the last step is spared, and a find of CA-ToMe serves from the next step on.
    steps = 5 if config.keep_detail or config.matching else 4
    used = 1 if config.matching else 0
    tiny.sample(model, 24, 32, steps=steps)
    record = record_of(model)
    assert record.places == sorted({place for place, _ in plans}) and record.steps == steps
    for place in record.places:
        # One plan of the first condition for every choice; a choice stands for two steps.
        first, second = (record.shot(place, used + step) for step in (0, 2))
        assert record.shot(place, used + 1) is first and record.shot(place, used + 3) is second
        whole_steps = (0, 2) if config.keep_detail else (None, None)
        assert (first.whole_step, second.whole_step) == whole_steps
        own = [plan for other, plan in plans if other == place][: 4 if config.matching else None]
        for shot, plan in ((first, own[0]), (second, own[len(own) // 2])):
            real = plan.merged if plan.padding is None else int((~plan.padding[0]).sum())
            assert plan.grids[0] == shot.grid and len(shot.kept) == real
            assert torch.equal(shot.kept.long(), plan.positions()[0, :real])
            follows = plan.positions()[0].gather(0, plan.groups()[0])
            assert torch.equal(shot.follows.long(), follows)
            # Whatever merges, its destination stands for itself.
            assert torch.equal(shot.follows[shot.kept.long()], shot.kept)


def test_nothing_is_recorded_without_the_node(running, monkeypatch):
    running[0] = (0, "id", {"1": {"class_type": "KSampler"}}, {}, [])
    monkeypatch.setattr(Recording, "note", lambda *_: pytest.fail("recorded"))
    monkeypatch.setattr(Recording, "enter", lambda *_: pytest.fail("recorded"))
    model = attach(tiny.sdxl(), MergeConfig())
    tiny.sample(model)
    assert record_of(model).places == []


def test_recording_changes_no_picture(running):
    model = attach(tiny.sdxl(), MergeConfig(tile_size=4))
    drawn = tiny.sample(model, 24, 32)
    running.clear()
    assert torch.equal(tiny.sample(model, 24, 32), drawn)


def test_every_run_replaces_the_record_and_copies_share_it(running):
    model = attach(tiny.sdxl(), MergeConfig(reuse_interval=1))
    tiny.sample(model, steps=4)
    record = record_of(model)
    assert record_of(model.clone()) is record and copy.deepcopy(record) is record
    before = record.shot(record.places[0], 3)
    tiny.sample(model.clone(), steps=2)
    assert record.steps == 2 and record.merging == {0, 1}
    assert record.shot(record.places[0], 1) is not before
    running.clear()
    tiny.sample(model)
    assert record.places == []


def test_a_record_is_small(running, monkeypatch):
    monkeypatch.setattr(recording, "MAX_SHOTS", 3)
    model = attach(tiny.sdxl(), MergeConfig(reuse_interval=1))
    tiny.sample(model, 16, 16, steps=4, batch=3)
    shots = list(record_of(model)._shots.values())
    assert len(shots) == 3
    for shot in shots:
        for index in (shot.kept, shot.follows):
            assert index.dtype is torch.int32 and index.device.type == "cpu"
            assert index.untyped_storage().nbytes() == index.numel() * 4
            assert index.numel() <= shot.grid[0] * shot.grid[1]


def test_colours_borders_lines_and_dots_are_those_of_the_groups():
    """Four tokens: the two of the left column merge into the upper one, the others stay."""
    picture = Image.new("RGB", (2, 2))
    for place, colour in enumerate([(200, 0, 0), (0, 90, 0), (0, 0, 200), (90, 90, 90)]):
        picture.putpixel((place % 2, place // 2), colour)
    picture = picture.resize((64, 64), Image.Resampling.NEAREST)
    shot = Shot("block", (2, 2), torch.tensor([0, 1, 3]), torch.tensor([0, 1, 0, 3]))
    drawn = draw_map(picture, shot, "title")
    assert drawn.width == 1024 and drawn.height > 1024
    dot, line, border = (217, 72, 15), (255, 255, 255), (31, 36, 48)
    assert drawn.getpixel((256, 256)) == dot
    assert drawn.getpixel((256, 512)) == line and drawn.getpixel((256, 768 - 8)) == line
    assert drawn.getpixel((512, 100)) == border and drawn.getpixel((512, 900)) == border
    assert drawn.getpixel((100, 512)) != border  # within a group
    assert drawn.getpixel((800, 512)) != border  # between two that stay
    red, green, blue = drawn.getpixel((100, 900))  # tinted towards (100, 0, 100)
    assert green == 0 and red == pytest.approx(60, abs=2) and blue == pytest.approx(140, abs=2)
    assert drawn.getpixel((800, 100)) == (0, 90, 0) and drawn.getpixel((768, 768)) == (90, 90, 90)


def test_the_node_draws_the_chosen_block_and_step(running):
    model = attach(tiny.flux(), MergeConfig(tile_size=4, reuse_interval=1))
    tiny.sample(model, 24, 32, steps=2)
    maps = [ToMAMergeMap.execute(model, PICTURE, 0, step)[0] for step in (0, 1)]
    assert maps[0].shape[0] == 1 and maps[0].shape[2] == 1024
    assert 0 <= maps[0].min() < maps[0].max() <= 1
    assert not torch.equal(*(image[:, :700] for image in maps))
    again = ToMAMergeMap.execute(model.clone(), PICTURE, 0, 0)[0]
    assert torch.equal(again, maps[0])


@pytest.mark.parametrize(
    ("config", "block", "step", "message"),
    [
        ({}, 99, 0, r"block must be from 0 to \d+, got 99.*\. Set it"),
        ({"end_percent": 0.5}, 0, 3, r"merged nothing at step 3 of 4.*at steps 0 to 1\. Set step"),
        ({}, 0, 4, r"step must be from 0 to 3, .*got 4\. Set it"),
        ({"tile_size": 1}, 0, 0, r"no tokens merged in the last run\. The text on the ToMA node"),
        ({"ratio": 0}, 0, 0, r"merges nothing\. Connect the model from a ToMA node"),
    ],
)
def test_where_nothing_can_be_drawn_the_remedy_is_named(running, config, block, step, message):
    model = attach(tiny.sdxl(), MergeConfig(**config))
    tiny.sample(model, steps=4)
    with pytest.raises(ValueError, match=message):
        ToMAMergeMap.execute(model, PICTURE, block, step)


def test_a_run_before_the_node_was_there_asks_for_another(running):
    model = attach(tiny.sdxl(), MergeConfig())
    running.clear()
    tiny.sample(model)
    with pytest.raises(ValueError, match=r"nothing was recorded.*change the sampler's seed"):
        ToMAMergeMap.execute(model, PICTURE, 0, 0)


def test_a_map_belongs_to_the_picture_of_the_latest_run(running):
    """Two samplers share a model: the record is of the one that ran last."""
    model = attach(tiny.sdxl(), MergeConfig())
    samplers = {key: {"class_type": "KSampler", "inputs": {"seed": key}} for key in ("a", "b")}
    maps = {
        f"map {key}": {"class_type": "ToMAMergeMap", "inputs": {"image": [key, 0]}}
        for key in samplers
    }
    running[0] = (0, "id", samplers | maps, {}, [])
    for key in samplers:
        with CurrentNodeContext("id", key):
            tiny.sample(model)
    with CurrentNodeContext("id", "map b"):
        assert ToMAMergeMap.execute(model, PICTURE, 0, 0)[0].shape[0] == 1
    with (
        CurrentNodeContext("id", "map a"),
        pytest.raises(ValueError, match=r"made another picture.*Change the seed.*node of its own"),
    ):
        ToMAMergeMap.execute(model, PICTURE, 0, 0)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A ComfyUI that keeps what nodes gave in earlier runs, as it does by itself in much memory."""
    # not by its name, which is that of a module of ComfyUI
    spec = importlib.util.spec_from_file_location("toma_tools_server", TOOLS / "server.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    log = tmp_path_factory.mktemp("server") / "comfyui.log"
    comfyui = Path(os.environ["COMFYUI_PATH"])
    with pytest.MonkeyPatch.context() as patch, demo.base_directory() as base:
        patch.setenv("OMP_NUM_THREADS", "1")
        with module.Server(comfyui, base, list(demo.PACKS), log, "--cache-lru", "100") as server:
            yield server


def paint(server, seed, names="cat face", **place):
    """Run the demo's graph, with a map of the `place` if one is given.

    Returns the picture of the map, and whether the sampler ran.
    """
    defaults = {**server.defaults(NODE), "reuse_interval": 1, "keep_detail": False}
    nodes = graph(0.5, 0, 2, [names], defaults)
    del nodes["report"]  # it runs with the sampler or not at all
    nodes["sampler"]["inputs"]["seed"] = seed
    if place:
        inputs = {"block": 0, "step": 0, **place, "model": ["toma", 0], "image": ["decode", 0]}
        nodes["map"] = {"class_type": "ToMAMergeMap", "inputs": inputs}
        nodes["save"]["inputs"]["images"] = ["map", 0]
    steps = []
    saved = server.run(nodes, lambda *step: steps.append(step))["save"]["images"][0]
    with Image.open(server.base / "output" / saved["subfolder"] / saved["filename"]) as picture:
        return picture.convert("RGB").tobytes(), bool(steps)


def test_a_map_of_a_cached_sampler_is_that_of_a_run(server):
    places = [{"step": 0}, {"step": 1}, {"block": 1}]
    maps = [paint(server, 1, **place) for place in places]
    assert [sampled for _, sampled in maps] == [True, False, False]
    assert len({drawn for drawn, _ in maps}) == 3
    # The prompt reads capitals as small letters; the cache does not.
    for names, place, (drawn, _) in zip(("Cat", "CAt", "CAT"), places, maps, strict=True):
        assert paint(server, 1, f"{names} face", **place) == (drawn, True)


def test_a_map_added_to_a_graph_that_ran_asks_for_another_run(server):
    _, sampled = paint(server, 2)
    assert sampled
    with pytest.raises(Failed, match=r"nothing was recorded.*change the sampler's seed"):
        paint(server, 2, step=0)
    assert paint(server, 3, step=0)[1], "the remedy helps"


def test_a_sampler_cached_from_before_the_latest_run_is_given_no_map_of_that_run(server):
    first, second = (paint(server, seed, step=0) for seed in (4, 5))
    assert first[1] and second[1]
    assert paint(server, 4, step=0) == (first[0], False), "the map is cached with its sampler"
    with pytest.raises(Failed, match=r"made another picture.*Change the seed"):
        paint(server, 4, step=1)
    assert paint(server, 6, step=1)[1], "the remedy helps"
