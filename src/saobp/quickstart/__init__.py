"""The quickstart: a tiny model trained on the spot, its attention before and after a refinement."""
