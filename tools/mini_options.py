"""What can be asked of `python tools train-mini`."""

from __future__ import annotations

import argparse

import torch

DEFAULT_PICTURES = 31


def default_precision(device: str) -> str:
    """bf16 where the device computes in it; elsewhere it is emulated, slower than fp32."""
    if device.startswith("cuda"):
        return "bf16" if torch.cuda.is_bf16_supported() else "fp32"
    # no public question answers this for a CPU; where the private one is gone, fp32 is right too
    has_bf16 = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    return "bf16" if device == "cpu" and has_bf16() else "fp32"


def parse(argv: list[str], about: str | None = None) -> argparse.Namespace:
    """The options, checked; ``about`` is what their help says first."""
    parser = argparse.ArgumentParser(
        prog="train-mini",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", default="toma-mini", metavar="DIR", help="folder of all files (./toma-mini)")
    add("--steps", type=int, default=1500, help="steps in all, those already done included (1500)")
    add("--batch", type=int, default=32, help="pictures a step (32)")
    add("--pictures", type=int, metavar="N", help=f"distinct pictures (emoji: {DEFAULT_PICTURES})")
    add("--images", metavar="DIR", help="train on the PNG files of DIR, their names as prompts")
    add("--scenes", action="store_true", help="train on emoji before flat and busy backgrounds")
    add("--size", type=int, default=64, metavar="PIXELS", help="side of a picture (64)")
    add("--patch", type=int, default=4, choices=(2, 4), help="pixels a side of a token (4)")
    add("--window", type=int, default=0, metavar="TOKENS", help="train on parts of this many "
        "tokens a side, neighbours and spread ones in turn: large grids learn several times "
        "faster (0: whole)")  # fmt: skip
    add("--whole-steps", type=int, default=0, metavar="N", help="last steps without --window (0)")
    add("--start", metavar="FILE", help="begin with the weights of this .safetensors")
    add("--learning-rate", type=float, default=9e-4, metavar="RATE", help="at its highest (9e-4)")
    add("--seed", type=int, default=0, help="of the first weights and of the batches (0)")
    add("--save-every", type=int, default=500, metavar="STEPS", help="checkpoint and sheet (500)")
    add("--sheet", type=int, default=8, metavar="N", help="pictures on the sample sheet (8)")
    add("--threads", type=int, help="CPU threads (PyTorch's choice)")
    add("--device", help="cpu or cuda (cuda where there is one)")
    add("--precision", choices=("bf16", "fp32"), help="of training (bf16 where it is native)")
    options = parser.parse_args(argv)
    at_least_one = ("steps", "batch", "pictures", "size", "save_every", "sheet", "threads")
    for name in (*at_least_one, "window", "whole_steps"):
        value, least = getattr(options, name), int(name in at_least_one)
        if value is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    if options.scenes and options.images:
        parser.error("--scenes draws its own pictures: leave out --images, or --scenes")
    if options.size % options.patch:
        nearest = max(1, round(options.size / options.patch)) * options.patch
        parser.error(
            f"--size must be a multiple of --patch {options.patch}, got {options.size}: "
            f"use {nearest}"
        )
    if not options.learning_rate > 0:
        parser.error(f"--learning-rate must be above 0, got {options.learning_rate}")
    if not options.images and not options.scenes:
        options.pictures = options.pictures or DEFAULT_PICTURES
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options.precision = options.precision or default_precision(options.device)
    return options
