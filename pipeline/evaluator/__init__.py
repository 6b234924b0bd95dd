"""The evaluator: success rates on held-out tasks by policy version, and whether they drop."""
