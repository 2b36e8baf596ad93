"""A plan as one page: what is shared, the packs as trees, what is nearly shared, what does not fit."""
