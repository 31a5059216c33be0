"""A model measured on some texts: what ``saobp diagnose`` does."""
