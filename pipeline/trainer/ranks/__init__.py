"""One trainer on several devices: ranks share a batch; here they start, agree and end."""
