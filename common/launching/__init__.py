"""How ranks find their place, each other and their cores, and how they fail together."""
