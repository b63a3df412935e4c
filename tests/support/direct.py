"""Single calls of a patched model, with arguments of the test's choice."""

from __future__ import annotations

from typing import Any

import tiny
import torch
from comfyui_toma.nodes.attach import attach, open_run
from merging import config_of

SIGMA = torch.tensor([0.7])


class Direct:
    """Calls ``BaseModel.apply_model`` as the core does, with options of the test's choice."""

    def __init__(
        self,
        model: Any,
        way: str = "block",
        ratio: float = 0.5,
        device: str = "cpu",
        batch: int = 1,
        size: tuple[int, int] = (16, 12),
        **settings: Any,
    ) -> None:
        self._model = attach(model, config_of(way, ratio, **settings))
        is_flux = tiny.is_flux(model)
        generator = torch.Generator().manual_seed(4)
        self.x = torch.randn(1, 16 if is_flux else 4, *size, generator=generator)
        self.x = self.x.repeat(batch, 1, 1, 1).to(device)
        pooled = tiny.FLUX_POOLED if is_flux else tiny.POOLED + 6 * 256
        self.arguments = {
            "c_crossattn": torch.randn(1, 7, tiny.CONTEXT, generator=generator)
            .repeat(batch, 1, 1)
            .to(device),
        }
        if is_flux or model.model.adm_channels:
            y = torch.randn(1, pooled, generator=generator)
            self.arguments["y"] = y.repeat(batch, 1).to(device)
        self.sigma = SIGMA.repeat(batch).to(device)
        sigmas = torch.tensor([0.7, 0.4, 0.0])
        self.run, self.options = open_run(self._model, self._model.model_options, sigmas, size)
        self.transformer_options = {
            **self.options["transformer_options"],
            "cond_or_uncond": [0],
            "uuids": ["a condition"],
            "sigmas": SIGMA,
            "sample_sigmas": sigmas,
        }

    def __call__(
        self,
        *,
        drop: Any = (),
        add: dict[str, Any] | None = None,
        positional: bool = False,
        **arguments: Any,
    ) -> torch.Tensor:
        options = {**self.transformer_options, **(add or {})}
        for key in drop:
            options.pop(key, None)
        arguments = {**self.arguments, **arguments}
        # Each call is a prediction of its own, as of a sampler.
        with torch.no_grad():
            return self.run.calc_cond_batch(self._apply, options, positional, arguments)

    def _apply(
        self, options: dict[str, Any], positional: bool, arguments: dict[str, Any]
    ) -> torch.Tensor:
        apply_model = self._model.model.apply_model
        if not positional:
            return apply_model(self.x, self.sigma, transformer_options=options, **arguments)
        text = arguments.pop("c_crossattn")
        return apply_model(self.x, self.sigma, None, text, None, options, **arguments)
