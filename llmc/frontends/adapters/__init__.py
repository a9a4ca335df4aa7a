"""LoRA adapters of a captured graph: merged into its weights, or to be taken at run time."""
