"""Checks of the part in which one model is trained on every cut, and the runs behind them."""
