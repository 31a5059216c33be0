"""The quickstart: a tiny model, trained plain and refined, and a page that compares them."""
