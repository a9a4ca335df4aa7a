"""Between texts and tokens: tokenizers, conversations, prompts and outputs."""
