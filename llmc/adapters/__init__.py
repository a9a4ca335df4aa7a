"""LoRA adapters as PEFT saves them: read strictly, without torch, for builds and for running engines alike."""
