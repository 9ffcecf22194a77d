"""Estimates a model's costs and cuts it into stages accordingly. Standard library only, so that the command line can use it."""
