"""Token merging for diffusion transformers, in plain torch."""

# The package knows tokens, grids and linear maps; it knows nothing of ComfyUI. Data flows one way:
# MergeConfig -> RegionLayout -> destinations -> MergePlan; a Session keeps the plans of one
# sampling run. Symbols and formulas follow ToMA (arXiv 2509.10918).
