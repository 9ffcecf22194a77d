"""What a model costs, and how it is cut into stages by that. Standard library only, so that the command line can ask too."""
