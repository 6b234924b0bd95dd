"""One trainer on several devices: ranks that share a batch, and how they start, agree and end."""
