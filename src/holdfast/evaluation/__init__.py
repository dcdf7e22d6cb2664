"""Evaluations of a model, and the score matrix made from them."""
