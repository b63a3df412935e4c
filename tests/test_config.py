"""Every bad value is refused with constraint, value and remedy."""

from __future__ import annotations

import pytest
from comfyui_toma.toma_core.config import MergeConfig, Region, Scope


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ratio": -0.1}, "ratio must be from 0.0 to 0.9, got -0.1"),
        ({"ratio": 1.0}, "ratio must be from 0.0 to 0.9, got 1.0"),
        ({"ratio": float("nan")}, "ratio must be from 0.0 to 0.9, got nan"),
        ({"ratio": "half"}, "ratio must be a number from 0.0 to 0.9, got 'half'"),
        ({"tile_size": 0}, "tile_size must be from 1 to 64, got 0"),
        ({"tile_size": 8.5}, "tile_size must be a whole number from 1 to 64, got 8.5"),
        ({"reuse_interval": 0}, "reuse_interval must be from 1 to 100, got 0"),
        ({"weight_interval": True}, "weight_interval must be a whole number"),
        ({"region": "diagonal"}, "region must be one of tile, stripe, global, got 'diagonal'"),
        ({"scope": "all"}, "scope must be one of block, modules, attention, got 'all'"),
        ({"start_percent": 0.6, "end_percent": 0.4}, "start_percent must be below end_percent"),
        ({"end_percent": 1.5}, "end_percent must be from 0.0 to 1.0, got 1.5"),
    ],
)
def test_a_bad_value_is_named(values, message):
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        MergeConfig(**values)


def test_names_become_members_and_the_config_is_frozen():
    config = MergeConfig(region="stripe", scope="modules")
    assert config.region is Region.STRIPE and config.scope is Scope.MODULES
    with pytest.raises(AttributeError):
        config.ratio = 0.1
