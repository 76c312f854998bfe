"""The refresh broker: one service reads the changes of a database on behalf of all databases that need them."""
