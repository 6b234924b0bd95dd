"""Policy weights on their way from trainer to inference: named by digest, written atomically, read in full."""
