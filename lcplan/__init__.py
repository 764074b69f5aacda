"""lcplan: does a long-context fine-tuning run fit, what dominates, what would make it fit."""
