"""Meshes, placements, layouts, tensors, plans and the programs made of them."""
