"""Online reward normalization: exact, and the same bits whatever the order of delivery."""
