"""Pure: boxes, meshes, placements, manifests. Values in, values out."""
