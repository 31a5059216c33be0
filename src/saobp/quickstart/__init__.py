"""The quickstart: a tiny model trained on the spot, plain and refined, and a page that compares them."""
