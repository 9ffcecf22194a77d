"""An interface in the form of OpenAI's, on this machine, in front of a model that goes on from a text."""
