"""The refresh broker: one service reads changes for all databases that want them."""
