"""Pure logic of the health checks.

One small class a check, and the monitor that feeds them window by window.
"""
