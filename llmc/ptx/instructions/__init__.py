"""What the machine can execute: one file a family of instructions."""
